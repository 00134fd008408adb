"""TensorBoard files have the records of `metrics.jsonl`, each once, also after a resume."""

from pathlib import Path

import pytest
from conftest import Cli, refusal

from chargpt.store.folder import RunFolder
from chargpt.training import writer

TINY = (
    "-s train.batch_size=4 -s model.n_layer=1 -s model.n_head=1 -s model.n_embd=16 "
    "-s model.block_size=16 -s train.evaluation_tokens=300 -s train.evaluate_every=2 "
    "-s train.save_every=2 -s train.sample_every=2 -s track.tensorboard=true"
).split()


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_tensorboard_has_every_metric_once_after_a_resume(cli: Cli, verse: Path) -> None:
    assert cli("train", verse, *TINY, "-s", "train.max_steps=4", "--out", "mine").returncode == 0
    resumed = cli("train", "--resume", "mine", "-s", "train.max_steps=8")
    assert resumed.returncode == 0, resumed.stderr
    records = RunFolder(Path("mine")).metrics.records()
    for name in ("loss", "grad_norm", "lr_factor", "val_nats_per_char"):
        wanted = [(r["step"], pytest.approx(r[name])) for r in records if name in r]
        assert wanted
        assert scalars(Path("mine/tensorboard"), name) == wanted
    assert len([r for r in records if "sample" in r]) == 4


def test_a_run_is_resumed_where_tensorboard_is_missing(
    cli: Cli, verse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("train", verse, *TINY, "-s", "train.max_steps=2", "--out", "mine").returncode == 0
    monkeypatch.setattr(writer, "find_spec", lambda name: None)
    words = ("train", "--resume", "mine", "-s", "train.max_steps=4")
    assert "or set it to false" in refusal(cli(*words))
    resumed = cli(*words, "-s", "track.tensorboard=false")
    assert resumed.returncode == 0, resumed.stderr


def test_records_of_repeated_steps_replace_the_earlier_ones(tmp_path: Path) -> None:
    first, resumed = (writer.RunWriter(RunFolder(tmp_path), tensorboard=True) for _ in range(2))
    for step in range(1, 6):
        first.record({"step": step, "loss": 1.0, "seconds": 0.1})
    first.close()
    resumed.continue_from(tmp_path / "step-00000003")
    resumed.record({"step": 4, "loss": 2.0, "seconds": 0.1})
    resumed.close()
    assert scalars(tmp_path / "tensorboard", "loss") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


def test_a_failed_write_is_ignored(tmp_path: Path) -> None:
    run = writer.RunWriter(RunFolder(tmp_path), tensorboard=True)
    (tmp_path / "tensorboard").touch()
    for step in (1, 2):
        run.record({"step": step, "loss": 1.0})
    assert (run.has_tensorboard, run.errors) == (False, {})
    assert len(RunFolder(tmp_path).metrics.records()) == 2


def test_without_tensorboard_the_setting_is_rejected_and_no_run_is_created(
    cli: Cli, verse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "find_spec", lambda name: None)
    done = cli("train", verse, *TINY, "-s", "train.max_steps=4", "--out", "mine")
    assert "pip install '.[track]' in chargpt's folder, or set it to false" in refusal(done)
    assert not Path("mine").exists()
