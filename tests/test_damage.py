"""Damaged, hostile or inconsistent run folders are rejected with a message that names the file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from saving import CONFIG, TOKENIZER, rewrite, save

from chargpt.errors import ChargptError, RunError
from chargpt.models import count_parameters, rotary_bytes
from chargpt.store import commit, selection
from chargpt.store.checkpoint import MODEL, OPTIMIZER, list_checkpoints
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
    model, state = folder / "model.safetensors", folder / "state.json"
    whole = model.read_bytes()
    for size in (0, 1, 8, len(whole) // 2, len(whole) - 1):
        model.write_bytes(whole[:size])
        with pytest.raises(RunError, match="size"):
            load_run(run.path, device="cpu")
    model.write_bytes(whole)
    kept = state.read_bytes()
    state.unlink()
    with pytest.raises(RunError, match=r"state\.json"):
        load_run(run.path, device="cpu")
    state.write_bytes(kept)
    assert load_run(run.path, device="cpu").step == 1
    (folder / "manifest.json").unlink()
    with pytest.raises(RunError):
        load_run(run.path, device="cpu")


def test_a_manifest_cannot_reach_outside_its_folder(run: RunFolder, tmp_path: Path) -> None:
    folder = save(run, 1)
    secret = tmp_path / "secret"
    secret.write_text("x")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../../../secret"] = manifest["files"].pop("state.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="malformed"):
        commit.read(folder, {"model.safetensors": 10**6})


def test_weights_of_another_shape_or_not_finite_are_rejected(run: RunFolder) -> None:
    save(run, 1, best=True, fill=float("nan"))
    with pytest.raises(RunError, match="is NaN or infinite"):
        load_run(run.path, device="cpu")
    save(run, 2)
    narrow = CONFIG.with_values({"model.n_embd": 8})
    rewrite(run.checkpoints / "step-00000002", "config.yaml", narrow.to_yaml().encode())
    with pytest.raises(RunError, match=r"do not match its config|larger than"):
        load_run(run.path, "2", "cpu")


def test_a_config_of_terabytes_is_rejected_before_its_weights_are_read(run: RunFolder) -> None:
    folder = save(run, 1)
    huge = CONFIG.with_values({"model.n_embd": 65536, "model.n_layer": 256})
    rewrite(folder, "config.yaml", huge.to_yaml().encode())
    os.truncate(folder / "model.safetensors", 10**13)  # sparse: it takes no disk
    with pytest.raises(ChargptError, match="GB of memory"):
        load_run(run.path, "1", "cpu")


def test_weights_larger_than_their_config_allows_are_not_read(run: RunFolder) -> None:
    folder = save(run, 1)
    weights = (folder / "model.safetensors").read_bytes()
    rewrite(folder, "model.safetensors", weights + bytes(10**6))
    with pytest.raises(RunError, match="larger than"):
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


def test_a_checkpoint_copied_from_another_run_is_rejected(run: RunFolder, tmp_path: Path) -> None:
    ours = save(run, 1)
    theirs = save(RunFolder(tmp_path / "other").create(CONFIG, TOKENIZER), 1, fill=0.7)
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    with pytest.raises(RunError, match=r"is not the checkpoint that latest\.json names"):
        load_run(run.path, "latest", "cpu")
    ours.rename(ours.with_name("step-00000005"))
    with pytest.raises(RunError, match="belongs to another checkpoint"):
        load_run(run.path, "5", "cpu")


def test_a_malformed_state_is_rejected(run: RunFolder) -> None:
    folder = save(run, 1)
    for content in (
        b"[]",
        b"{}",
        b'{"step": 2}',
        b'{"step": "1"}',
        b'{"step": 1, "seconds": "x"}',
        b'{"step": 1, "seconds": 1%s}' % (b"0" * 400),
        b'{"step": 1, "seconds": NaN}',
    ):
        rewrite(folder, "state.json", content)
        with pytest.raises(RunError, match=r"state\.json is malformed \("):
            load_run(run.path, "1", "cpu")


def test_a_pointer_that_does_not_match_falls_back_with_a_note(run: RunFolder) -> None:
    save(run, 1)
    save(run, 2, best=True)
    (run.checkpoints / "best.json").write_text('{"checkpoint": "step-00000001"}')
    loaded = load_run(run.path, "best", "cpu")
    assert loaded.step == 2
    assert "best.json" in loaded.notes[0]


def edit_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def with_header(header: dict[str, object]) -> bytes:
    """Return a safetensors file that consists of a header."""
    content = json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest not an object": (
        lambda folder: (folder / "manifest.json").write_text("[1]"),
        "FOLDER/manifest.json cannot be read (it is not a JSON object); "
        "restore it or use another checkpoint",
    ),
    "manifest not JSON": (
        lambda folder: (folder / "manifest.json").write_text("{"),
        "FOLDER/manifest.json cannot be read (Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)); restore it or use another checkpoint",
    ),
    "a huge manifest": (
        lambda folder: os.truncate(folder / "manifest.json", 10**12),
        "FOLDER/manifest.json cannot be read (it is larger than 64,000,000 bytes); "
        "restore it or use another checkpoint",
    ),
    "manifest with a malformed list of files": (
        lambda folder: edit_manifest(folder, files=[]),
        "FOLDER/manifest.json lists no files; use another checkpoint",
    ),
    "manifest with a malformed entry": (
        lambda folder: edit_manifest(folder, files={"config.yaml": "large"}),
        "FOLDER/manifest.json is malformed at 'config.yaml'; use another checkpoint",
    ),
    "manifest with a size without a SHA-256": (
        lambda folder: edit_manifest(folder, files={"config.yaml": {"size": 5}}),
        "FOLDER/manifest.json is malformed at 'config.yaml'; use another checkpoint",
    ),
    "file not listed": (
        lambda folder: edit_manifest(folder, files={}),
        "FOLDER lacks config.yaml; use another checkpoint",
    ),
    "file missing": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "FOLDER/tokenizer.json cannot be read (No such file or directory); "
        "restore it or use another checkpoint",
    ),
    "config not UTF-8": (
        lambda folder: rewrite(folder, "config.yaml", b"\xff"),
        "FOLDER is not a checkpoint ('utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte); use another",
    ),
    "config not a mapping": (
        lambda folder: rewrite(folder, "config.yaml", b"[1]"),
        "FOLDER/config.yaml has no `key: value` lines; `chargpt config` lists the settings",
    ),
    "config with a value of the wrong type": (
        lambda folder: rewrite(folder, "config.yaml", b"\nseed: x\n"),
        "FOLDER/config.yaml: line 2: seed: expected a number (it is 'x')",
    ),
    "tokenizer malformed": (
        lambda folder: rewrite(folder, "tokenizer.json", b"{}"),
        "FOLDER/tokenizer.json cannot be used as a tokenizer (it is not a chargpt tokenizer); "
        "restore it or train again",
    ),
    "weights malformed": (
        lambda folder: rewrite(folder, "model.safetensors", b"x"),
        "FOLDER/model.safetensors is not a safetensors file (",
    ),
    "a tensor of 2^63 columns and no rows": (
        lambda folder: rewrite(
            folder,
            "model.safetensors",
            with_header({"w": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}),
        ),
        "FOLDER/model.safetensors is not a safetensors file (",
    ),
    "optimizer malformed": (
        lambda folder: rewrite(folder, "optimizer.safetensors", b"x"),
        "FOLDER/optimizer.safetensors is not a safetensors file (",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_has_a_message_that_names_the_file(damage: str, run: RunFolder) -> None:
    inflict, message = DAMAGES[damage]
    folder = save(run, 1)
    inflict(folder)
    with pytest.raises(ChargptError) as caught:
        run.load("1")
    found = str(caught.value).replace(str(folder), "FOLDER")
    assert found.startswith(message) if message.endswith("(") else found == message


def test_weights_of_another_model_are_rejected_naming_the_first_difference(run: RunFolder) -> None:
    folder = save(run, 1)
    deeper = CONFIG.with_values({"model.qk_norm": False})
    rewrite(folder, "config.yaml", deeper.to_yaml().encode())
    with pytest.raises(RunError) as caught:
        load_run(run.path, "1", "cpu")
    assert str(caught.value) == (
        f"the weights in {folder} do not match its config "
        "(first at blocks.0.attention.key_norm.weight); use another checkpoint"
    )


def test_a_malformed_pointer_is_skipped_with_a_note(run: RunFolder) -> None:
    folder = save(run, 1)
    pointer = run.checkpoints / "latest.json"
    pointer.write_text('{"checkpoint": "../../elsewhere"}')

    def skipped() -> list[str]:
        saved, sentences = selection.load(run.path, "latest", optimizer=True)
        assert saved.folder == list_checkpoints(run.checkpoints)[-1]
        return sentences

    assert skipped() == [f"{pointer} names no checkpoint; resuming the run repairs it"]
    save(run, 2)  # a single checkpoint without a pointer is that of a killed first save
    pointer.unlink()
    assert skipped() == [
        f"{pointer} cannot be read (No such file or directory); "
        "restore it or use another checkpoint"
    ]
    pointer.symlink_to(folder / "state.json")
    assert skipped() == [
        f"{pointer} cannot be read (it is not a regular file); restore it or use another checkpoint"
    ]


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


@pytest.mark.parametrize(
    ("key", "value"),
    {
        "seconds": "1",
        "best_step": "1",
        "best_nats_per_char": "1",
        "evaluations_since_best": 0.5,
        "rollbacks": None,
        "threads": "2",
        "corpus_key": 1,
        "text_name": None,
        "world_size": 10**18,
        "stopped_early": 1,
    }.items(),
)
def test_every_field_of_a_state_is_type_checked(key: str, value: object, run: RunFolder) -> None:
    folder = save(run, 1)
    rewrite(folder, "state.json", json.dumps({"step": 1, key: value}).encode())
    with pytest.raises(RunError, match=r"state\.json is malformed \("):
        run.load("1")


def test_the_size_limit_of_weights_is_exact(
    run: RunFolder,
) -> None:
    n_parameters = count_parameters(CONFIG.model, TOKENIZER.vocab_size)
    max_bytes = 4 * n_parameters + 400 * (12 * CONFIG.model.n_layer + 8)
    for name, limit in (("model.safetensors", max_bytes), ("optimizer.safetensors", 4 * max_bytes)):
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


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1", "1" * 5000])
def test_a_number_out_of_range_in_a_state_is_rejected(number: str, run: RunFolder) -> None:
    folder = save(run, 1)
    content = '{"step": 1, "best_nats_per_char": %s}' % number  # noqa: UP031
    rewrite(folder, "state.json", content.encode())
    with pytest.raises(RunError, match=r"state\.json is malformed \(best_nats_per_char|\(it:"):
        run.load("1")


def test_unknown_keys_of_a_state_are_ignored(run: RunFolder) -> None:
    folder = save(run, 1)
    rewrite(folder, "state.json", b'{"step": 1, "added_later": [1]}')
    assert run.load("1").state.step == 1
