"""The cases of `torture.py`: each does harm to real runs and says what went wrong, or None.

A case is a function of (work folder, index, random); what cases of a row share is made once in the
work folder. All runs are of one tiny model on the project's own text.
"""

import contextlib
import errno
import functools
import gzip
import hashlib
import json
import os
import pickle
import shutil
import signal
import socket
import string
import struct
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from torture_faults import Ended, Fault, run_forked

from chargpt.config import Config, load_config
from chargpt.errors import ChargptError, DivergedError, UnknownCharacterError
from chargpt.store import checkpoint
from chargpt.store.run import RunFolder, load_run
from chargpt.store.saved import Saved
from chargpt.store.verify import require_whole, verify
from chargpt.text.corpus import Corpus, prepare
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training.trainer import Trainer

REPOSITORY = Path(__file__).parent.parent
TEXT = REPOSITORY / "data" / "lighthouse.txt"
GOLDEN = REPOSITORY / "tests" / "golden"
STEPS, SAVE_EVERY = 100, 4
TINY: dict[str, object] = {
    "device": "cpu",
    "text.path": str(TEXT),
    "model.n_layer": 1,
    "model.n_head": 1,
    "model.n_embd": 16,
    "model.block_size": 16,
    "model.dropout": 0.1,
    "train.max_steps": STEPS,
    "train.batch_size": 4,
    "train.accumulate": 2,
    "train.ema": 0.9,
    "train.evaluate_every": 20,
    "train.evaluate_characters": 200,
    "train.save_every": SAVE_EVERY,
    "train.sample_every": 0,
}
LINKS = 10  # kills that one run survives before it is compared with one that was left alone
Case = Callable[[Path, int, Random], str | None]


# -- what cases share ---------------------------------------------------------------------------


def train_words(**changes: object) -> list[str]:
    """Return the words that train the tiny model into R."""
    settings = {**TINY, **changes}
    text = str(settings.pop("text.path"))
    written = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
    return ["train", text, "--out", "R", "--force", *written]


RESUME = ["train", "--resume", "R"]


def fresh(folder: Path) -> Path:
    """Return the folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def sums(run: Path) -> list[str]:
    """Return the sha256 of the weights and of the optimizer in the latest checkpoint."""
    folder = checkpoint.follow(run / "checkpoints", "latest")
    names = ("model.safetensors", "optimizer.safetensors")
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]


@functools.cache
def reference(work: Path) -> tuple[list[str], float]:
    """Return the sums of a run that nothing happened to, and the seconds that it took."""
    folder = fresh(work / "reference")
    ended = run_forked(train_words(), folder)
    assert ended.code == 0, ended.err
    return sums(folder / "R"), ended.seconds


def done(run: Path) -> bool:
    """Return whether the run's last step is saved."""
    with contextlib.suppress(ChargptError):
        return checkpoint.follow(run / "checkpoints", "latest").name.endswith(f"{STEPS:08}")
    return False


def sentences(ended: Ended) -> list[str]:
    """Return the error sentences that a process printed."""
    return [line for line in ended.err.splitlines() if line.startswith("chargpt: ")]


def refused(ended: Ended) -> str | None:
    """Return what is wrong with how a process refused its input: exit 2, one sentence."""
    if "Traceback" in ended.err:
        return f"a traceback: {ended.err[-500:]}"
    if ended.code != 2 or len(sentences(ended)) != 1:
        return f"exit {ended.code} with {sentences(ended)} {ended.err[-300:]!r}"
    return None


def kept(run: Path, acknowledged: Path) -> str | None:
    """Return what is wrong with what a run has on disk, after the saves that were acknowledged."""
    lines = acknowledged.read_text().split() if acknowledged.exists() else []
    if not lines:
        return None
    try:
        saved, skipped = RunFolder(run).load("latest")
    except ChargptError as error:
        return f"step {lines[-1]} was saved, and the run is lost: {error}"
    if saved.state["step"] < int(lines[-1]):
        return f"step {lines[-1]} was saved, and {saved.state['step']} is what is left"
    return f"saved checkpoints are damaged: {skipped}" if skipped else None


# -- row 1: kill -9 -----------------------------------------------------------------------------


def kill(work: Path, index: int, random: Random) -> str | None:
    """Kill a training process, at a random moment or inside a save; every tenth time go to the end.

    The run must then be what it would have been, bit for bit.
    """
    expected, seconds = reference(work)
    folder = work / f"killed-{index // LINKS:03}"
    if index % LINKS == 0:
        fresh(folder)
    run, saves = folder / "R", folder / "saves"
    for _ in range(20):
        if done(run):  # it was killed after its last step
            if sums(run) != expected:
                return "the run is not the one that was left alone"
            fresh(folder)
        has_checkpoint = bool(checkpoint.committed(run / "checkpoints"))
        words = RESUME if has_checkpoint else train_words()
        if index % 2:  # under `checkpoints` nothing is touched but by saves, 45 operations each
            fault = Fault(run / "checkpoints", random.randint(1, 45 * 6))
            ended = run_forked(words, folder, fault=fault, acknowledged=saves)
        else:
            moment = random.uniform(0, seconds)

            def stab(number: int, moment: float = moment) -> None:
                time.sleep(moment)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

            ended = run_forked(words, folder, acknowledged=saves, during=stab)
        if ended.code == -signal.SIGKILL:
            break
        if ended.code != 0:
            return f"exit {ended.code}: {ended.err[-500:]}"
        if sums(run) != expected:
            return "the resumed run is not the one that was left alone"
        fresh(folder)  # it was done before it could be killed: another one
    else:
        return "it could not be killed in 20 tries"
    if wrong := kept(run, saves):
        return wrong
    if index % LINKS == LINKS - 1 and not done(run):
        words = RESUME if checkpoint.committed(run / "checkpoints") else train_words()
        ended = run_forked(words, folder)
        if ended.code != 0:
            return f"it could not be resumed: {ended.err[-300:]}"
    if index % LINKS == LINKS - 1 and sums(run) != expected:
        return "the resumed run is not the one that was left alone"
    return None


# -- row 2: file operations fail ----------------------------------------------------------------

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EMFILE)


def fail_files(work: Path, index: int, random: Random) -> str | None:
    """Let the Nth file operation fail, once or from there on."""
    expected, _ = reference(work)
    folder = fresh(work / "failing")
    number = index + 1 if index < 100 else random.randint(1, 2000)
    for_ever = index >= 100 and index % 2 == 1
    fault = Fault(folder / "R", number, ERRORS[index % len(ERRORS)], for_ever)
    ended = run_forked(train_words(), folder, fault=fault, acknowledged=folder / "saves")
    words = sentences(ended)
    told = ended.err.count("the disk refuses") - sum("the disk refuses" in word for word in words)
    if "Traceback" in ended.err or ended.code not in (0, 1, 2) or told > 1:
        return f"operation {number}: exit {ended.code}, told {told} times: {ended.err[-500:]}"
    if len(words) != (0 if ended.code == 0 else 1):
        return f"operation {number}: exit {ended.code} with the sentences {words}"
    if wrong := kept(folder / "R", folder / "saves"):
        return f"operation {number}: {wrong}"
    left = [str(path) for path in folder.rglob("*.tmp") if not path.name.endswith(".old.tmp")]
    if left:
        return f"operation {number}: it left {left}"
    if ended.code == 0 and sums(folder / "R") != expected:
        return f"operation {number}: another model came of it"
    return None


def small_disk(work: Path, index: int, random: Random) -> str | None:
    """Train on a file system that fills up, and go on once there is room."""
    expected, _ = reference(work)
    folder = fresh(work / "small")
    if os.system(f"mount -t tmpfs -o size=2m tmpfs {folder} 2>/dev/null") != 0:
        return "skipped: no tiny file system can be mounted here"
    try:
        ballast = folder / "ballast"
        free = random.randint(0, 60_000)

        def fill_up(_: int) -> None:
            while not (folder / "R" / "metrics.jsonl").exists():
                time.sleep(0.01)
            with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while shutil.disk_usage(folder).free > free:
                    file.write(b"x" * 4096)

        ended = run_forked(train_words(), folder, acknowledged=folder / "saves", during=fill_up)
        if "Traceback" in ended.err or ended.code not in (0, 1) or len(sentences(ended)) > 1:
            return f"exit {ended.code}: {ended.err[-500:]}"
        if wrong := kept(folder / "R", folder / "saves"):
            return wrong
        ballast.unlink()
        if ended.code == 1:
            words = RESUME if checkpoint.committed(folder / "R/checkpoints") else train_words()
            ended = run_forked(words, folder)
        if ended.code != 0 or sums(folder / "R") != expected:
            return f"with room again: exit {ended.code}: {ended.err[-500:]}"
    finally:
        os.system(f"umount {folder}")
    return None


# -- row 3: damage ------------------------------------------------------------------------------


@functools.cache
def whole_runs(work: Path) -> tuple[Path, Path]:
    """Return two runs of one shape, each with one checkpoint."""
    runs = []
    for seed in (1, 2):
        folder = fresh(work / f"whole-{seed}")
        words = train_words(**{"seed": seed, "train.max_steps": 1})
        ended = run_forked(words, folder)
        assert ended.code == 0, ended.err
        runs.append(folder / "R")
    return runs[0], runs[1]


class Canary:
    """What a pickle would run, if anybody unpickled it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def damage(work: Path, index: int, random: Random) -> str | None:
    """Damage one thing of a run whose only checkpoint it is; reading must refuse it aloud."""
    whole, other = whole_runs(work)
    run = work / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run)
    folder = run / "checkpoints" / "step-00000001"
    foreign = other / "checkpoints" / "step-00000001"
    canary = work / "canary"
    files = [*sorted(folder.iterdir()), run / "checkpoints" / "latest.json"]
    path = random.choice(files)
    content = bytearray(path.read_bytes())
    if index < 500:
        bit = random.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        what = f"bit {bit} of {path.name} flipped"
    elif index < 800:
        size = random.randrange(len(content))
        path.write_bytes(content[:size])
        what = f"{path.name} cut to {size} bytes"
    elif index < 900:
        what = _miss_or_swap(random, path, folder, foreign, run)
    elif index < 950:
        stream = pickle.dumps(Canary(canary), protocol=random.randint(0, 5))
        what = f"{path.name} a pickle"
        path.write_bytes(stream + bytes(random.randrange(100)))
        if random.random() < 0.5 and path.name not in ("manifest.json", "latest.json"):
            _forge(folder, run)
    else:
        what = _be_hostile(random, folder, run, work)
    try:
        saved, skipped = RunFolder(run).load("latest")
        require_whole(saved)
        require_same(saved, RunFolder(whole).load("latest")[0])
        wrong = None if skipped else f"{what}: read without a word"
    except ChargptError:
        wrong = None
    if canary.exists():
        return f"{what}: code was run"
    return wrong


def require_same(one: Saved, two: Saved) -> None:
    """Check that what was read is what was saved."""
    assert one.config == two.config
    assert one.tokenizer == two.tokenizer
    for left, right in ((one.model, two.model), (one.optimizer, two.optimizer)):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def _miss_or_swap(random: Random, path: Path, folder: Path, foreign: Path, run: Path) -> str:
    kind = random.randrange(4)
    name = random.choice(["model.safetensors", "optimizer.safetensors", "tokenizer.json"])
    if kind == 0 and path.name != "latest.json":
        path.unlink()
        return f"{path.name} missing"
    if kind == 1:
        model, optimizer = folder / "model.safetensors", folder / "optimizer.safetensors"
        weights = model.read_bytes()
        model.write_bytes(optimizer.read_bytes())
        optimizer.write_bytes(weights)
        return "weights and optimizer swapped"
    if kind == 2:
        shutil.rmtree(folder)
        shutil.copytree(foreign, folder)
        return "another run's checkpoint in its place"
    (folder / "model.safetensors").write_bytes((foreign / "model.safetensors").read_bytes())
    (folder / name).write_bytes((foreign / name).read_bytes() + b" ")
    return f"another run's weights and {name}"


def _forge(folder: Path, run: Path) -> None:
    """Make manifest and pointer agree with what is there, as an enemy would."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != "manifest.json" and path.is_file():
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            files[path.name] = {"size": len(content), "sha256": digest}
    manifest = json.dumps({"step": 1, "files": files})
    (folder / "manifest.json").write_text(manifest)
    digest = hashlib.sha256(manifest.encode()).hexdigest()
    pointer = {"checkpoint": folder.name, "manifest_sha256": digest}
    (run / "checkpoints" / "latest.json").write_text(json.dumps(pointer))


def _be_hostile(random: Random, folder: Path, run: Path, work: Path) -> str:
    """Put in something made to harm, all sums right."""
    model = folder / "model.safetensors"
    header = {"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    nest = b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    hostile: list[tuple[str, Callable[[], object]]] = [
        ("a header of 2^63 bytes", lambda: model.write_bytes(struct.pack("<Q", 2**63 - 1))),
        ("a header of 4 GB", lambda: model.write_bytes(struct.pack("<Q", 2**32) + b"{" * 100)),
        ("a tensor of 4 TB", lambda: model.write_bytes(_tensors(header))),
        ("a header of nests", lambda: model.write_bytes(struct.pack("<Q", len(nest)) + nest)),
        ("weights of 1 TB", lambda: os.truncate(model, 10**12)),
        ("a state of nests", lambda: (folder / "state.json").write_bytes(nest)),
        ("another step", lambda: (folder / "state.json").write_text('{"step": 7}')),
        ("a step that is text", lambda: (folder / "state.json").write_text('{"step": "1"}')),
        ("a tokenizer of nests", lambda: (folder / "tokenizer.json").write_bytes(nest)),
        ("another vocabulary", lambda: CharTokenizer.fit("ab").save(folder / "tokenizer.json")),
        ("a config of aliases", lambda: (folder / "config.yaml").write_text(_aliases())),
        ("a config of terabytes", lambda: _edit_config(folder, "n_embd: 16", "n_embd: 65536")),
        ("a config of layers", lambda: _edit_config(folder, "n_layer: 1", "n_layer: 256")),
        ("weights by a link", lambda: _link(model, work)),
        ("a folder by a link", lambda: _link(folder, work)),
        ("weights by a pipe", lambda: (model.unlink(), os.mkfifo(model))),
    ]
    what, do = random.choice(hostile)
    do()
    if what not in ("weights of 1 TB", "weights by a pipe", "a folder by a link"):
        _forge(folder, run)
    paths = random.random()
    if paths < 0.2:  # or a name that climbs out
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"]["../../../config.yaml"] = manifest["files"].pop("config.yaml")
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return f"{what}, and a path that climbs out"
    return what


def _tensors(header: dict[str, Any]) -> bytes:
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content


def _aliases() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines)


def _edit_config(folder: Path, old: str, new: str) -> None:
    path = folder / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _link(path: Path, work: Path) -> None:
    away = work / "away"
    shutil.rmtree(away, ignore_errors=True)
    away.unlink(missing_ok=True)
    shutil.move(path, away)
    path.symlink_to(away)


# -- row 4: resume at every step ----------------------------------------------------------------

KINDS: tuple[dict[str, object], ...] = (
    {},
    {"optim.name": "adamw", "train.ema": 0.0, "schedule.kind": "cosine"},
    {"model.attention": "average", "train.clip_norm": "null", "model.dropout": 0.3},
    {"model.kind": "bigram", "train.accumulate": 1},
    {"dtype": "bfloat16", "schedule.cooldown": 0.3, "train.ngram_targets": 0.5},
    {"train.patience": 60, "model.mlp": "none", "model.qk_norm": False, "model.scaled": False},
)
RESUMED_STEPS = 50


@functools.cache
def stepwise(work: Path, kind: int) -> tuple[Corpus, Path]:
    """Return a run that was saved at each of its steps, and its text."""
    config = _stepwise_config(kind)
    corpus = prepare(config.text)
    run = RunFolder(fresh(work / f"stepwise-{kind}") / "R")
    trainer = Trainer(config, corpus, folder=run)
    run.create(trainer.config, corpus.tokenizer, force=False)
    for _ in trainer.steps():
        pass
    return corpus, run.path


def _stepwise_config(kind: int) -> Config:
    settings = {
        **TINY,
        "train.max_steps": RESUMED_STEPS,
        "train.save_every": 1,
        "train.evaluate_every": 7,
        "train.keep_last": RESUMED_STEPS,
        **KINDS[kind],
    }
    return Config().with_values({k: None if v == "null" else v for k, v in settings.items()})


def resume_at(work: Path, index: int, _: Random) -> str | None:
    """Go on from one step of one kind of run: weights, optimizer and losses must be the same."""
    kind, step = index % len(KINDS), index // len(KINDS) % RESUMED_STEPS
    corpus, run = stepwise(work, kind)
    copy = fresh(work / "resumed") / "R"
    if step == 0:
        folder, saved = RunFolder(copy), None
    else:
        saved, _ = RunFolder(run).load(str(step))
        (copy / "checkpoints").mkdir(parents=True)
        shutil.copy(run / "metrics.jsonl", copy)
        folder = RunFolder(copy)
    config = (saved.config if saved else _stepwise_config(kind)).with_values(
        {"train.save_every": RESUMED_STEPS, "train.keep_last": 1}
    )
    trainer = Trainer(config, corpus, folder=folder, saved=saved)
    if saved is None:
        folder.create(trainer.config, corpus.tokenizer, force=False)
    for _report in trainer.steps():
        pass
    ours, theirs = folder.load("latest")[0], RunFolder(run).load("latest")[0]
    for one, two in ((ours.model, theirs.model), (ours.optimizer, theirs.optimizer)):
        differing = [name for name in two if not torch.equal(one[name], two[name])]
        if differing or one.keys() != two.keys():
            return f"{KINDS[kind]} from step {step}: {differing[:3]} differ"
    lines = [[{**r, "seconds": 0} for r in RunFolder(p).metrics.records()] for p in (copy, run)]
    if lines[0] != lines[1]:
        return f"{KINDS[kind]} from step {step}: the metrics differ"
    facts = ("best_step", "best_nats_per_char", "evaluations_since_best", "stopped_early")
    if any(ours.state[fact] != theirs.state[fact] for fact in facts):
        return f"{KINDS[kind]} from step {step}: the state differs"
    return None


# -- row 6: numbers go bad ----------------------------------------------------------------------


def go_bad(work: Path, index: int, random: Random) -> str | None:
    """Put NaN or infinity into a loss, a gradient or a weight; nothing of it may be kept."""
    place, value = ("loss", "gradient", "weight")[index % 3], (float("nan"), float("inf"))
    bad, step = value[index // 3 % 2], random.randint(SAVE_EVERY + 1, 40)
    config = Config().with_values({**TINY, "train.max_steps": 60, "train.rollbacks": index // 30})
    corpus = prepare(config.text)
    run = RunFolder(fresh(work / "bad") / "R")
    trainer = Trainer(config, corpus, folder=run)
    run.create(trainer.config, corpus.tokenizer, force=False)
    real, struck = trainer.accumulate_gradients, False

    def struck_gradients(number: int) -> torch.Tensor:
        nonlocal struck
        first = list(trainer.model.parameters())[random.randrange(3)]
        if number == step and not struck and place == "weight":
            struck = True
            with torch.no_grad():
                first.view(-1)[0 if place != "weight" else slice(None)] = bad
        loss = real(number)
        if number == step and not struck:
            struck = True
            if place == "loss":
                return loss + bad
            assert first.grad is not None
            first.grad.view(-1)[0] = bad
        return loss

    trainer.accumulate_gradients = struck_gradients  # type: ignore[method-assign]
    before: dict[str, torch.Tensor] = {}
    saved_before = 0
    try:
        for report in trainer.steps():
            if report.step <= step and trainer.progress.step <= step:
                before = {n: p.clone() for n, p in trainer.model.state_dict().items()}
                saved_before = trainer.saved_step or 0
    except DivergedError as error:
        if config.train.rollbacks:
            return f"{bad} in a {place} at step {step + 1}: no way back was taken: {error}"
        if f"step {step + 1} " not in str(error) or "--resume" not in str(error):
            return f"{bad} in a {place} at step {step + 1}: it says {error}"
        if place != "weight" and any(
            not torch.equal(p, before[n]) for n, p in trainer.model.state_dict().items()
        ):
            return f"{bad} in a {place} at step {step + 1}: the update was made"
        saved, skipped = run.load("latest")
        if skipped or saved.state["step"] != saved_before:
            return f"{bad} in a {place} at step {step + 1}: the last checkpoint suffered: {skipped}"
        return None
    if not config.train.rollbacks:
        return f"{bad} in a {place} at step {step + 1} was not noticed"
    returns = [r for r in run.metrics.records() if "rolled_back_from" in r]
    if [r["rolled_back_from"] for r in returns] != [step + 1] or not trainer.finished:
        return f"{bad} in a {place} at step {step + 1}: the metrics say {returns}"
    return None


# -- row 7: signals -----------------------------------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def send_signal(work: Path, index: int, random: Random) -> str | None:
    """Send a signal at some moment: it saves, exits 128 + n in time, and can go on."""
    expected, seconds = reference(work)
    number = SIGNALS[index % len(SIGNALS)]
    name = signal.Signals(number).name
    for _ in range(20):
        folder = fresh(work / "signalled")
        moment = random.uniform(0.02, seconds)

        def send(process: int, moment: float = moment) -> None:
            time.sleep(moment)
            os.kill(process, number)

        ended = run_forked(train_words(), folder, acknowledged=folder / "saves", during=send)
        if ended.code != 0:  # else it was done before
            break
    saves = folder / "saves"
    lines = saves.read_text().split() if saves.exists() else []
    # before it has begun and when it has ended, the signal may find no one who minds it
    bare = not lines or lines[-1] == str(STEPS)
    if "Traceback" in ended.err or ended.code not in (128 + number, -number if bare else None):
        return f"{name}: exit {ended.code}: {ended.err[-500:]}"
    if ended.seconds > 5:
        return f"{name}: it took {ended.seconds:.1f} s"
    run = folder / "R"
    if wrong := kept(run, folder / "saves"):
        return f"{name}: {wrong}"
    if "and saved; go on with" in ended.err or not checkpoint.committed(run / "checkpoints"):
        words = RESUME if checkpoint.committed(run / "checkpoints") else train_words()
        ended = run_forked(words, folder)
        if ended.code != 0:
            return f"{name}: resuming failed: {ended.err[-500:]}"
    if sums(run) != expected:
        return f"{name}: another model came of it"
    return None


# -- row 9: bad texts ---------------------------------------------------------------------------


def bad_text(work: Path, index: int, random: Random) -> str | None:
    """Give what is no text, or none to train on; one sentence must say so."""
    folder = fresh(work / "texts")
    path = folder / "text.txt"
    verse = TEXT.read_bytes()
    extra: list[str] = []
    words = bytes(random.choice(b"abcdef \n") for _ in range(random.randint(1, 12)))

    def listen() -> None:
        with socket.socket(socket.AF_UNIX) as at:
            at.bind(str(path))

    cut = random.randrange(200, len(verse))
    kinds: list[tuple[str, Callable[[], object]]] = [
        ("empty", lambda: path.write_bytes(b"")),
        ("short", lambda: path.write_bytes(words)),
        ("a BOM alone", lambda: path.write_bytes(b"\xef\xbb\xbf")),
        ("UTF-16, no BOM", lambda: path.write_bytes(verse.decode().encode("utf-16-le")[: 2 * cut])),
        ("byte 0x92", lambda: path.write_bytes(verse[:cut] + b"it\x92s" + verse[cut:])),
        ("a lone surrogate", lambda: path.write_bytes(verse[:cut] + b"\xed\xa0\x80")),
        ("random bytes", lambda: path.write_bytes(b"\x00\xff" + random.randbytes(5000))),
        ("a pipe", lambda: os.mkfifo(path)),
        ("an empty folder", lambda: path.mkdir()),
        ("a folder of others", lambda: (path.mkdir(), (path / "x.png").write_bytes(verse))),
        ("a socket", listen),
        ("missing", lambda: None),
        ("a link to itself", lambda: path.symlink_to(path)),
        ("gzip, cut", lambda: _gzip(folder, verse, random.randrange(20, 200), extra)),
        ("no such encoding", lambda: (path.write_bytes(verse), extra.extend(["--encoding", "no"]))),
    ]
    what, make = kinds[index % len(kinds)]
    make()
    text = extra.pop(0) if what == "gzip, cut" else "text.txt"
    ended = run_forked(["train", text, *extra, "-s", "train.max_steps=1"], folder, seconds=30)
    wrong = refused(ended)
    return f"{what}: {wrong}" if wrong else None


def _gzip(folder: Path, verse: bytes, cut: int, extra: list[str]) -> None:
    (folder / "text.txt.gz").write_bytes(gzip.compress(verse)[:-cut])
    extra.append("text.txt.gz")


# -- row 10: settings ---------------------------------------------------------------------------


def known_keys() -> list[str]:
    """Return every setting's dotted key."""
    tree = Config().model_dump()
    return [
        f"{section}.{key}"
        for section, keys in tree.items()
        if isinstance(keys, dict)
        for key in keys
    ]


def any_value(random: Random, depth: int = 0) -> Any:
    """Return something that YAML can hold."""
    simple: list[Callable[[], Any]] = [
        lambda: random.choice([None, True, False, "", "auto", "1e-4", "~", "5", "no", ".inf"]),
        lambda: random.choice([0, -1, 1, 2**63, 10**40, 65536, 7]),
        lambda: random.choice([0.5, -1e300, float("nan"), float("inf"), 1e-320]),
        lambda: "".join(random.choices(string.printable + "жé\u2028\x85", k=random.randrange(12))),
    ]
    deep: list[Callable[[], Any]] = [
        lambda: [any_value(random, depth + 1) for _ in range(random.randrange(3))],
        lambda: {str(any_value(random, 9)): any_value(random, depth + 1) for _ in range(2)},
    ]
    return random.choice(simple if depth > 2 else [*simple, *deep])()


def any_config(work: Path, _: int, random: Random) -> str | None:
    """Read a config of likely and unlikely keys and values: it is taken, or refused in words."""
    keys = known_keys()
    tree: dict[str, Any] = {}
    for _ in range(random.randrange(6)):
        key = random.choice(keys) if random.random() < 0.8 else str(any_value(random, 9))
        section, _, name = key.partition(".")
        inside = tree.setdefault(section, {})
        if isinstance(inside, dict) and name:
            inside[name] = any_value(random)
        else:
            tree[section] = any_value(random)
    text = json.dumps(tree) if random.random() < 0.5 else _loose_yaml(tree)
    for _ in range(random.choice([0, 0, 1, 3])):  # and some damage
        at = random.randrange(len(text) + 1)
        text = (
            text[:at]
            + random.choice([":", "\t", "&a", "*a", "- ", "\n", "{", "#", "!!python"])
            + text[at:]
        )
    path = work / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        load_config(path)
    except ChargptError as error:
        if not str(error):
            return f"no words for {text!r}"
    except Exception as error:
        return f"{type(error).__name__} {error} for {text!r}"
    return None


def _loose_yaml(tree: dict[str, Any]) -> str:
    lines = []
    for section, keys in tree.items():
        lines.append(f"{section}:" + ("" if isinstance(keys, dict) else f" {keys}"))
        if isinstance(keys, dict):
            lines += [f"  {name}: {value}" for name, value in keys.items()]
    return "\n".join(lines)


def typo(work: Path, index: int, random: Random) -> str | None:
    """Misspell a key by one letter: the right one must be suggested."""
    keys = [key for key in known_keys() if len(key.split(".")[1]) > 4]
    key = keys[index % len(keys)]
    section, _, name = key.partition(".")
    at = random.randrange(1, len(name) - 1)
    spelt = random.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + name[at] + name[at:],
            name[:at] + name[at + 1] + name[at] + name[at + 2 :],
        ]
    )
    if spelt == name:
        spelt = name[:at] + name[at + 1 :]
    (work / "typo.yaml").write_text(f"{section}:\n  {spelt}: 1\n")
    try:
        load_config(work / "typo.yaml")
    except ChargptError as error:
        return None if f"did you mean {key}?" in str(error) else f"{spelt} for {key}: {error}"
    return f"{section}.{spelt} was taken"


# -- row 11: the tokenizer ----------------------------------------------------------------------


def any_text(random: Random) -> str:
    """Return a text of characters from anywhere in Unicode."""
    ranges = [(32, 127), (0, 32), (0x400, 0x500), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0, 0xD7FF)]
    low, high = random.choice(ranges)
    return "".join(chr(random.randint(low, high)) for _ in range(random.randint(1, 60)))


def round_trip(work: Path, _: int, random: Random) -> str | None:
    """Fit, encode, decode, save and load: the text comes back."""
    text = any_text(random)
    tokenizer = CharTokenizer.fit(text)
    again = CharTokenizer.from_json(tokenizer.to_json())
    part = "".join(random.choices(text, k=20))
    if again != tokenizer or again.decode(tokenizer.encode(part)) != part:
        return f"{text!r} did not come back"
    return None


def unseen_prompt(work: Path, _: int, random: Random) -> str | None:
    """Give a prompt of other characters: refused in words, or handled as asked."""
    tokenizer, prompt = CharTokenizer.fit(TEXT.read_text(encoding="utf-8")), any_text(random)
    seen = [c for c in prompt if c in tokenizer.characters]
    if len(tokenizer.encode(prompt, unknown="skip")) != len(seen):
        return f"{prompt!r}: skip kept something else"
    if len(tokenizer.encode(prompt, unknown="replace")) != len(prompt):
        return f"{prompt!r}: replace changed the length"
    try:
        tokenizer.encode(prompt)
    except UnknownCharacterError:
        return None if len(seen) < len(prompt) else f"{prompt!r} was refused"
    return None if len(seen) == len(prompt) else f"{prompt!r} was taken"


# -- row 13: what earlier releases saved --------------------------------------------------------


def golden(work: Path, index: int, _: Random) -> str | None:
    """Load a run that a release saved, and compare its logits with those it had then."""
    releases = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
    release = releases[index % len(releases)]
    run = load_run(release / "run", device="cpu")
    stored = load_file(release / "logits.safetensors")
    with torch.no_grad():
        logits = run.model(stored["tokens"])
    if not torch.allclose(logits, stored["logits"], rtol=1e-5, atol=1e-5):
        return f"{release.name}: the logits are others"
    problems = verify(RunFolder(release / "run")).problems
    return f"{release.name}: {problems}" if problems else None
