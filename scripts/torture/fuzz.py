"""Coverage-guided fuzzing of the readers of untrusted files: only ChargptError may escape.

    python scripts/torture/fuzz.py [checkpoint tokenizer config] [--runs 1000000]
        [--json benchmarks/fuzz.json]

Needs `pip install atheris` (libFuzzer for Python). Each target starts from real files and ends
after `--runs` executions or at the first crash, whose input remains in the work folder.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]
TARGETS = ("checkpoint", "tokenizer", "config")
MAX_LENGTH = 4096  # bytes of an input
FILES = ("model.safetensors", "optimizer.safetensors", "config.yaml", "tokenizer.json")
FILES += ("state.json", "manifest.json")


def main() -> None:
    """Fuzz each selected target in its own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=TARGETS, choices=TARGETS)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    results = {}
    for target in args.targets:
        work = Path(tempfile.mkdtemp(prefix=f"fuzz-{target}-", dir=memory_disk()))
        corpus = work / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(seeds(target)):
            (corpus / f"seed-{number}").write_bytes(seed)
        tokens = dictionary(work / "dictionary", seeds(target))
        options = [f"-runs={args.runs}", f"-max_len={MAX_LENGTH}", f"-artifact_prefix={work}/"]
        start = time.monotonic()
        done = subprocess.run(
            [
                *(sys.executable, __file__, "--child", target, str(work)),
                *(*options, f"-dict={tokens}", str(corpus)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        ran = re.search(r"Done (\d+) runs", done.stderr)
        covered = re.findall(r"cov: (\d+)", done.stderr)
        results[target] = {
            "runs": int(ran.group(1)) if ran else 0,
            "seconds": round(time.monotonic() - start),
            "branches_covered": int(covered[-1]) if covered else 0,
            "crashes": 0 if done.returncode == 0 else 1,
        }
        print(f"{target}: {results[target]}", flush=True)
        if done.returncode != 0:
            print(done.stderr[-3000:])
        else:
            shutil.rmtree(work)
    if args.json is not None:
        from bench.record import provenance

        report = json.loads(args.json.read_text()) if args.json.exists() else {}
        report |= {target: {**provenance(), **result} for target, result in results.items()}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if any(result["crashes"] for result in results.values()) else 0)


def memory_disk() -> str | None:
    """Return a tmpfs folder if there is one, because fuzzing writes a million files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def seeds(target: str) -> list[bytes]:
    """Return the initial inputs of a target."""
    golden = sorted((REPOSITORY / "tests" / "golden").iterdir())[-1] / "run"
    (folder,) = (golden / "checkpoints").glob("step-*")
    if target == "config":
        shipped = (REPOSITORY / "configs").glob("*.yaml")
        return [path.read_bytes() for path in (*shipped, folder / "config.yaml")]
    if target == "tokenizer":
        return [(folder / "tokenizer.json").read_bytes()]
    return [
        bytes([number]) + (folder / name).read_bytes()[: MAX_LENGTH - 1]
        for number, name in enumerate(FILES)
    ]


def dictionary(path: Path, texts: list[bytes]) -> Path:
    """Write the identifiers in some texts as a libFuzzer dictionary; return its path."""
    identifiers = {
        word for text in texts for word in re.findall(rb"[A-Za-z_][A-Za-z0-9_.-]+", text)
    }
    path.write_bytes(b"".join(b'"%s"\n' % word for word in sorted(identifiers)))
    return path


def fuzz(target: str, work: Path) -> None:
    """Run the fuzzer of one target in this process."""
    import atheris

    with atheris.instrument_imports(include=["chargpt", "yaml"]):
        import chargpt.store.folder
        import chargpt.text.tokenizer  # noqa: F401
    readers: dict[str, Callable[[Path], Callable[[bytes], None]]] = {
        "checkpoint": checkpoint_reader,
        "tokenizer": tokenizer_reader,
        "config": config_reader,
    }
    read = readers[target](work)
    from chargpt.errors import ChargptError

    def one(content: bytes) -> None:
        try:
            read(content)
        except ChargptError as error:
            if not str(error):
                raise AssertionError("an error without a message") from error

    atheris.Setup([sys.argv[0], *sys.argv[4:]], one)
    atheris.Fuzz()


def config_reader(_: Path) -> Callable[[bytes], None]:
    """Return a function that reads bytes as a config and checks the YAML round trip."""
    from chargpt.config import validate
    from chargpt.files import parse_yaml

    def read(content: bytes) -> None:
        tree, lines = parse_yaml(content.decode(errors="replace"), "fuzz")
        config = validate(tree, "fuzz", lines)
        reread, _ = parse_yaml(config.to_yaml(), "reread")
        assert validate(reread, "reread") == config

    return read


def tokenizer_reader(_: Path) -> Callable[[bytes], None]:
    """Return a function that reads bytes as a tokenizer and checks the encoding round trip."""
    from chargpt.text.tokenizer import CharTokenizer

    def read(content: bytes) -> None:
        tokenizer = CharTokenizer.from_json(content.decode(errors="replace"), "fuzz")
        assert tokenizer.decode(tokenizer.encode(tokenizer.characters)) == tokenizer.characters

    return read


def checkpoint_reader(work: Path) -> Callable[[bytes], None]:
    """Return a function that reads a checkpoint with one file replaced, checksums being correct.

    The unchanged config is parsed once for speed; configs have their own target.
    """
    import chargpt.store.checkpoint as store
    from chargpt.store.folder import RunFolder
    from chargpt.store.verify import require_intact

    golden = sorted((REPOSITORY / "tests" / "golden").iterdir())[-1] / "run" / "checkpoints"
    (source,) = golden.glob("step-*")
    run = work / "run"
    folder = run / "checkpoints" / source.name
    folder.mkdir(parents=True)
    original = {name: (source / name).read_bytes() for name in FILES}
    manifest = json.loads(original["manifest.json"])
    for name, content in original.items():
        (folder / name).write_bytes(content)

    parse, check = store.parse_yaml, store.validate
    text = original["config.yaml"].decode()
    parsed = parse(text, "config.yaml")
    checked = check(*parsed[:1], "config.yaml")
    store.parse_yaml = lambda content, origin: parsed if content == text else parse(content, origin)
    store.validate = lambda tree, *rest: checked if tree is parsed[0] else check(tree, *rest)

    def read(content: bytes) -> None:
        name = FILES[content[0] % len(FILES)] if content else FILES[0]
        changed = content[1:]
        (folder / name).write_bytes(changed)
        if name != "manifest.json":
            digest = hashlib.sha256(changed).hexdigest()
            listed = {**manifest["files"], name: {"size": len(changed), "sha256": digest}}
            (folder / "manifest.json").write_text(json.dumps({**manifest, "files": listed}))
        try:
            saved = RunFolder(run).load(str(manifest["step"]))
            require_intact(saved)
        finally:
            for changed_name in {name, "manifest.json"}:
                (folder / changed_name).write_bytes(original[changed_name])

    return read


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        fuzz(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
