"""What a run leaves on disk is whole, checked, and safe to read."""

import json
from pathlib import Path

import pytest
import torch

from chargpt.config import Config
from chargpt.errors import RunError
from chargpt.models import build_model
from chargpt.store import checkpoint
from chargpt.store.run import RunFolder, load_run, newest_run
from chargpt.text.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer.fit("hello world")
CONFIG = Config().with_values(
    {"model.n_layer": 1, "model.n_embd": 16, "model.block_size": 8, "train.keep_last": 2}
)


def save(run: RunFolder, step: int, *, best: bool = False, fill: float = 0.5) -> Path:
    model = build_model(CONFIG.model, TOKENIZER.vocab_size)
    weights = {name: torch.full_like(t, fill) for name, t in model.state_dict().items()}
    return run.save(
        config=CONFIG,
        tokenizer=TOKENIZER,
        state={"step": step},
        model=weights,
        optimizer={"adamw.step": torch.tensor(float(step))},
        is_best=best,
    )


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", CONFIG, TOKENIZER, force=False)


def test_a_checkpoint_holds_the_files_that_the_format_names(run: RunFolder) -> None:
    folder = save(run, 1000)
    assert folder.name == "step-00001000"
    names = {
        "model.safetensors",
        "optimizer.safetensors",
        "config.yaml",
        "tokenizer.json",
        "state.json",
        "manifest.json",
    }
    assert {path.name for path in folder.iterdir()} == names
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(listed) == names - {"manifest.json"}


def test_what_is_loaded_is_what_was_saved(run: RunFolder) -> None:
    save(run, 7, best=True, fill=0.25)
    loaded = load_run(run.path, device="cpu")
    assert loaded.step == 7
    assert loaded.config == CONFIG
    assert loaded.tokenizer == TOKENIZER
    assert all((p == 0.25).all() for p in loaded.model.parameters())


def test_reading_takes_best_and_latest_and_steps_as_asked(run: RunFolder) -> None:
    save(run, 1, best=True)
    save(run, 2)
    save(run, 3)
    assert load_run(run.path, device="cpu").step == 1
    assert load_run(run.path, "latest", "cpu").step == 3
    assert load_run(run.path, "2", "cpu").step == 2
    with pytest.raises(RunError, match="no checkpoint '9'"):
        load_run(run.path, "9", "cpu")


def test_pruning_keeps_the_best_and_the_last(run: RunFolder) -> None:
    for step in range(1, 7):
        save(run, step, best=step == 2)
    steps = [path.name for path in checkpoint.committed(run.checkpoints)]
    assert steps == ["step-00000002", "step-00000005", "step-00000006"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_every_flipped_bit_is_noticed(run: RunFolder, name: str) -> None:
    save(run, 1, best=True)
    path = save(run, 2, best=True) / name
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), max(1, len(content) // 20)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(RunError, match="changed since it was saved"):
            checkpoint.read(path.parent)
    loaded = load_run(run.path, "best", "cpu")
    assert loaded.step == 1
    assert name in loaded.state["skipped"][0]


def test_truncated_missing_and_swapped_files_are_refused(run: RunFolder) -> None:
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
        checkpoint.read(folder)


def test_weights_of_another_shape_or_not_finite_are_refused(run: RunFolder) -> None:
    save(run, 1, best=True, fill=float("nan"))
    with pytest.raises(RunError, match="not finite"):
        load_run(run.path, device="cpu")
    files = checkpoint.read(run.checkpoints / "step-00000001")
    wider = CONFIG.with_values({"model.n_embd": 32})
    files["config.yaml"] = wider.to_yaml().encode()
    folder = checkpoint.commit(run.checkpoints, 2, files)
    checkpoint.point(run.checkpoints, "best", folder)
    with pytest.raises(RunError, match="are not those of its config"):
        load_run(run.path, "2", "cpu")


def test_an_unfinished_save_is_never_read(run: RunFolder) -> None:
    save(run, 1, best=True)
    unfinished = run.checkpoints / "step-00000002.tmp"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert load_run(run.path, "latest", "cpu").step == 1
    save(run, 2)
    assert load_run(run.path, "latest", "cpu").step == 2
    assert not unfinished.exists()


def test_a_write_that_fails_leaves_the_checkpoint_before(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1, best=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.rename", full)
        with pytest.raises(OSError, match="No space"):
            save(run, 2)
    assert load_run(run.path, "latest", "cpu").step == 1


def test_a_pointer_that_disagrees_falls_back_and_says_so(run: RunFolder) -> None:
    save(run, 1)
    save(run, 2, best=True)
    (run.checkpoints / "best.json").write_text('{"checkpoint": "step-00000001"}')
    loaded = load_run(run.path, "best", "cpu")
    assert loaded.step == 2
    assert "best.json" in loaded.state["skipped"][0]


def test_the_same_weights_give_the_same_bytes(run: RunFolder) -> None:
    first = (save(run, 1) / "model.safetensors").read_bytes()
    second = (save(run, 2) / "model.safetensors").read_bytes()
    assert first == second


def test_a_run_is_never_overwritten_without_force(run: RunFolder, tmp_path: Path) -> None:
    save(run, 1)
    with pytest.raises(RunError, match="--force"):
        RunFolder.create(run.path, CONFIG, TOKENIZER, force=False)
    assert checkpoint.committed(run.checkpoints)
    RunFolder.create(run.path, CONFIG, TOKENIZER, force=True)
    assert not checkpoint.committed(run.checkpoints)
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="not a run"):
        RunFolder.create(precious, CONFIG, TOKENIZER, force=True)
    assert (precious / "thesis.tex").exists()


def test_metrics_survive_a_line_cut_short_and_forget_what_is_done_again(run: RunFolder) -> None:
    for step in (1, 2, 3):
        run.append_metrics({"step": step, "loss": 1.0 / step})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in run.metrics()] == [1, 2, 3]
    run.forget_metrics_after(2)
    assert [record["step"] for record in run.metrics()] == [1, 2]


def test_the_newest_run_is_the_one_saved_last(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="chargpt train"):
        newest_run(tmp_path)
    for name in ("b", "a"):
        save(RunFolder.create(tmp_path / name, CONFIG, TOKENIZER, force=False), 1)
    assert newest_run(tmp_path) == tmp_path / "a"


def test_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no folder"):
        load_run(tmp_path / "nothing")
    with pytest.raises(RunError, match="there is no run in"):
        load_run(tmp_path)
    empty = RunFolder.create(tmp_path / "new", CONFIG, TOKENIZER, force=False)
    with pytest.raises(RunError, match="no checkpoint yet"):
        load_run(empty.path)
