"""Damaged, hostile or inconsistent run folders are rejected with a message that names the file."""

import json
import os
import shutil
from pathlib import Path

import pytest
from saving import CONFIG, TOKENIZER, rewrite, save

from chargpt.errors import ChargptError, RunError
from chargpt.models import count_parameters, rotary_bytes
from chargpt.store import commit
from chargpt.store.checkpoint import MODEL, OPTIMIZER
from chargpt.store.folder import RunFolder
from chargpt.store.run import load_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create(CONFIG, TOKENIZER)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_every_flipped_bit_is_detected(run: RunFolder, name: str, notes: list[str]) -> None:
    save(run, 1, best=True)
    path = save(run, 2, best=True) / name
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), max(1, len(content) // 20)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(RunError, match="changed since it was saved"):
            commit.read(path.parent, {name: len(content)})
    assert run.load("best").state.step == 1
    assert name in notes[0]


def test_truncated_and_missing_files_are_rejected(run: RunFolder) -> None:
    folder = save(run, 1, best=True)
    model, state, manifest = map(folder.joinpath, (MODEL, "state.json", "manifest.json"))
    whole = model.read_bytes()
    for size in (0, 1, 8, len(whole) // 2, len(whole) - 1):
        model.write_bytes(whole[:size])
        with pytest.raises(RunError, match="changed since"):
            load_run(run.path, device="cpu")
    model.write_bytes(whole)
    kept = state.read_bytes()
    state.unlink()
    with pytest.raises(RunError, match=r"state\.json"):
        load_run(run.path, device="cpu")
    state.write_bytes(kept)
    assert load_run(run.path, device="cpu").step == 1
    manifest.write_text(manifest.read_text().replace('"size": ', '"size": 1'))
    with pytest.raises(RunError, match="changed since"):
        load_run(run.path, device="cpu")
    manifest.unlink()
    with pytest.raises(RunError):
        load_run(run.path, device="cpu")


def test_weights_of_another_shape_or_not_finite_are_rejected(run: RunFolder) -> None:
    save(run, 1, best=True, fill=float("nan"))
    with pytest.raises(RunError, match="is NaN or infinite"):
        load_run(run.path, device="cpu")
    for changes, cause in (
        ({"model.n_embd": 8}, r"do not match its config|larger than"),
        ({"model.qk_norm": False}, r"\(first at blocks\.0\.attention\.key_norm\.weight\)"),
    ):
        folder = save(run, 2)
        rewrite(folder, "config.yaml", CONFIG.with_values(changes).to_yaml().encode())
        with pytest.raises(RunError, match=cause):
            load_run(run.path, "2", "cpu")


def test_a_config_of_terabytes_is_rejected_before_its_weights_are_read(run: RunFolder) -> None:
    folder = save(run, 1)
    huge = CONFIG.with_values({"model.n_embd": 65536, "model.n_layer": 256})
    rewrite(folder, "config.yaml", huge.to_yaml().encode())
    os.truncate(folder / "model.safetensors", 10**13)  # sparse: it takes no disk
    with pytest.raises(ChargptError, match="GB of memory"):
        load_run(run.path, "1", "cpu")


@pytest.mark.parametrize("kind", ["link to a file", "link to a folder", "pipe"])
def test_links_and_pipes_are_rejected_without_opening_them(
    kind: str, run: RunFolder, tmp_path: Path
) -> None:
    folder = save(run, 1)
    victim = folder if "folder" in kind else folder / "model.safetensors"
    shutil.move(victim, tmp_path / "away")
    if kind == "pipe":
        os.mkfifo(victim)
    else:
        victim.symlink_to(tmp_path / "away")
    with pytest.raises(RunError, match=r"not a regular file|symbolic link"):
        load_run(run.path, device="cpu")


def test_a_renamed_checkpoint_is_rejected(run: RunFolder) -> None:
    save(run, 1).rename(run.checkpoints / "step-00000005")
    with pytest.raises(RunError, match="it is of another step"):
        load_run(run.path, "5", "cpu")


def with_header(header: dict[str, object]) -> bytes:
    """Return a safetensors file that consists of a header."""
    content = json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content


EMPTY_TENSOR = {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}
ENTRY = {"size": 1, "sha256": 64 * "0"}
WEIGHTS = "model.safetensors is not a safetensors file ("
STATE = "state.json is malformed ("
# a file, what happens to it, and the message: its new content, size, entry in the manifest, or None
DAMAGES: list[tuple[str, bytes | int | dict[str, object] | None, str]] = [
    ("manifest.json", b"[1]", "manifest.json cannot be read (it is not a JSON object); restore it"),
    ("manifest.json", b"{", "manifest.json cannot be read (Expecting property name"),
    ("manifest.json", 10**12, "manifest.json cannot be read (it is larger than 1,000,000 bytes)"),
    *(
        ("manifest.json", {"files": files}, "manifest.json cannot be read (it is malformed)")
        for files in ([], {"config.yaml": "large"}, {"config.yaml": {"size": 5}})
    ),
    ("manifest.json", {"files": {"../a": ENTRY}}, "config.yaml has changed since it was saved"),
    ("manifest.json", {"files": {}}, "config.yaml has changed since it was saved; use another"),
    ("tokenizer.json", None, "tokenizer.json cannot be read (No such file or directory); restore"),
    ("tokenizer.json", b"{}", "tokenizer.json cannot be used as a tokenizer (it is not a chargpt"),
    ("config.yaml", b"\xff", " is not a checkpoint ('utf-8' codec can't decode byte 0xff"),
    ("config.yaml", b"[1]", "config.yaml has no `key: value` lines; `chargpt config` lists"),
    ("config.yaml", b"\nseed: x\n", "config.yaml: line 2: seed: expected a number (it is 'x')"),
    ("model.safetensors", b"x", WEIGHTS),
    ("model.safetensors", with_header({"w": EMPTY_TENSOR}), WEIGHTS),
    ("optimizer.safetensors", b"x", "optimizer.safetensors is not a safetensors file ("),
    *(("state.json", content, STATE) for content in (b"[]", b"{}", b'{"step": 2}')),
    *(
        ("state.json", b'{"step": 1, "%s": %s}' % (key, value), STATE)
        for key, values in {
            b"step": [b'"1"'],
            b"seconds": [b'"x"', b'"1"', b"1" + b"0" * 400, b"NaN"],
            b"best_step": [b'"1"'],
            b"best_nats_per_char": [b'"1"', b"NaN", b"Infinity", b"-1", b"1" * 5000],
            b"evaluations_since_best": [b"0.5"],
            b"rollbacks": [b"null"],
            b"threads": [b'"2"'],
            b"corpus_key": [b"1"],
            b"text_name": [b"null"],
            b"world_size": [b"1" + b"0" * 18],
            b"stopped_early": [b"1"],
        }.items()
        for value in values
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), DAMAGES)
def test_each_damage_has_a_message_that_names_the_file(
    name: str, change: bytes | int | dict[str, object] | None, message: str, run: RunFolder
) -> None:
    folder = save(run, 1)
    path = folder / name
    if change is None:
        path.unlink()
    elif isinstance(change, int):
        os.truncate(path, change)
    elif isinstance(change, dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    elif name == "manifest.json":
        path.write_bytes(change)
    else:
        rewrite(folder, name, change)
    with pytest.raises(ChargptError) as caught:
        run.load("1")
    assert str(folder) in str(caught.value)
    assert message in str(caught.value)


def test_without_an_intact_checkpoint_every_damage_is_named(run: RunFolder) -> None:
    folders = [save(run, 1), save(run, 2)]
    for folder in folders:
        (folder / "state.json").unlink()
    with pytest.raises(RunError) as caught:
        run.load("latest")
    missing = [
        f"{folder}/state.json cannot be read (No such file or directory); "
        "restore it or use another checkpoint"
        for folder in (folders[1], folders[0])
    ]
    assert str(caught.value) == "no checkpoint is intact: " + "; ".join(missing)
    with pytest.raises(RunError, match="has no checkpoint '9'; it has best, latest and steps 1, 2"):
        run.load("9")
    shutil.rmtree(folders[0])
    with pytest.raises(RunError) as caught:
        run.load("latest")
    assert str(caught.value) == missing[0]


def test_the_size_limit_of_weights_is_exact(run: RunFolder) -> None:
    n_parameters = count_parameters(CONFIG.model, TOKENIZER.vocab_size)
    max_bytes = 4 * n_parameters + 400 * (12 * CONFIG.model.n_layer + 8)
    for name, limit in (("model.safetensors", max_bytes), ("optimizer.safetensors", 5 * max_bytes)):
        folder = save(run, 1)
        rewrite(folder, name, bytes(limit + 1))
        with pytest.raises(RunError, match=rf"{name} cannot be read \(it is larger than"):
            run.load("1")
        rewrite(folder, name, bytes(limit))
        with pytest.raises(RunError, match=f"{name} is not a safetensors file"):
            run.load("1")


def test_memory_is_checked_before_a_checkpoint_is_read(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(run, 1)
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr("chargpt.store.checkpoint.require_memory", lambda *args: asked.append(args))
    run.load("1")
    files = sum((folder / name).stat().st_size for name in (MODEL, OPTIMIZER))
    wanted = 2 * files + rotary_bytes(CONFIG.model)
    assert asked == [(wanted, f"the checkpoint {folder}")]
    os.truncate(folder / MODEL, 1 << 40)  # a sparse file: no more than the config allows is read
    with pytest.raises(RunError):
        run.load("1", optimizer=False)
    n_parameters = count_parameters(CONFIG.model, TOKENIZER.vocab_size)
    limit = 4 * n_parameters + 400 * (12 * CONFIG.model.n_layer + 8)
    assert asked[-1][0] == 2 * limit + rotary_bytes(CONFIG.model)


def test_a_missing_optimizer_file_does_not_prevent_loading_the_model(run: RunFolder) -> None:
    folder = save(run, 1)
    (folder / "optimizer.safetensors").unlink()
    assert load_run(run.path, "1", "cpu").notes == ()
    with pytest.raises(RunError, match=r"optimizer\.safetensors"):
        run.load("1")


def test_unknown_keys_of_a_state_are_ignored(run: RunFolder) -> None:
    folder = save(run, 1)
    rewrite(folder, "state.json", b'{"step": 1, "added_later": [1], "__dataclass_self__": 1}')
    assert run.load("1").state.step == 1
