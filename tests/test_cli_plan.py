"""`chargpt plan`: the plan of a budget, here and on paper."""

import gzip
import json
import re
from pathlib import Path

import pytest
from conftest import REPOSITORY, Cli

from chargpt.cli.console import short, size
from chargpt.config import Config, TextConfig
from chargpt.models import build_model, count_parameters
from chargpt.text.prepare import load_corpus
from chargpt.training import performance
from chargpt.training.budget import Trials
from chargpt.training.optim import Muon, Optimizer
from chargpt.training.performance import (
    GPUS,
    UTILISATION,
    compute_seconds,
    launch_seconds,
    muon_stacks,
    plan_on_gpus,
    sample_corpus,
    sent_bytes,
)
from chargpt.training.start import Request, open_session


def config_of(n_layer: int, n_embd: int, batch_size: int, block_size: int = 256) -> Config:
    model = {"n_layer": n_layer, "n_embd": n_embd, "n_head": n_embd // 64, "block_size": block_size}
    values = {f"model.{key}": value for key, value in model.items()}
    return Config().with_values({**values, "train.batch_size": batch_size})


@pytest.mark.parametrize(
    ("n_layer", "n_embd", "batch_size", "milliseconds"),  # "The first GPU" of benchmarks/LOG.md
    [
        (4, 96, 8, 1.61),
        (4, 128, 8, 1.77),
        (6, 256, 16, 3.78),
        (6, 384, 16, 4.95),
        (12, 768, 32, 31),
    ],
)
def test_step_times_on_paper_are_those_of_an_h200_within_a_fifth(
    n_layer: int, n_embd: int, batch_size: int, milliseconds: float
) -> None:
    config = config_of(n_layer, n_embd, batch_size)
    seconds = compute_seconds(config, 65, GPUS["h200"], 1)
    assert 1000 * seconds == pytest.approx(milliseconds, rel=0.2)


def test_flops_and_bytes_of_a_step_are_those_computed_by_hand() -> None:
    config = config_of(4, 128, 8)
    assert muon_stacks(config) == [(16, 128, 128), (12, 128, 384)]
    muon = Optimizer(build_model(config.model, 65), config.optim).optimizers[1]
    assert isinstance(muon, Muon)
    assert [tuple(buffer.shape) for _, buffer in muon.groups] == muon_stacks(config)
    # 6 N + 12 L C T for each of 2,048 tokens; 5 iterations of 3 products for each matrix
    forward_backward = 2048 * (6 * 870_272 + 12 * 4 * 128 * 256)
    square, wide = 5 * (4 + 2) * 128**3, 5 * (4 * 3 + 2) * 128**3
    for n_gpus, update in ((1, 16 * square + 12 * wide), (8, 2 * square + 2 * wide)):
        computed = compute_seconds(config, 65, GPUS["h100"], n_gpus) - launch_seconds(config)
        expected = forward_backward / n_gpus + update
        assert computed * UTILISATION * 989e12 == pytest.approx(expected)
    assert sent_bytes(config, 65, 1) == 0
    all_reduce = 4 * 2 * 7 / 8 * 870_272
    all_gather = 4 * 7 * (2 * 128 * 128 + 2 * 128 * 384)
    assert sent_bytes(config, 65, 8) == pytest.approx(all_reduce + all_gather)


def test_the_plan_of_this_machine_is_what_train_would_do_and_leaves_nothing(
    verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def speed(trials: Trials, config: Config, _max_seconds: float = 0) -> float:
        trials.group.broadcast(0.0)
        return 1e10 / count_parameters(config.model, 40)

    monkeypatch.setattr(Trials, "__call__", speed)
    monkeypatch.setattr(Trials, "measure_scoring", lambda *_: 1e-6)
    words = "plan", verse, "--budget", "60s", "-s", "device=cpu"
    planned = json.loads(cli(*words, "--json").stdout)
    assert "nats/char, predicted" in cli(*words).stdout
    assert not list(tmp_path.iterdir())
    request = Request(str(verse), settings={"device": "cpu"}, budget="60s", out=tmp_path / "run")
    with open_session(request) as session:
        flat = session.trainer.config.flatten()
    for key in ("model.n_layer", "model.n_embd", "model.block_size", "train.batch_size"):
        assert planned[key.split(".")[1]] == flat[key]
    assert planned["max_steps"] == pytest.approx(flat["train.max_steps"], rel=0.3)  # a busy machine


def test_a_plan_on_paper_says_how_many_gpus_are_worth_having_and_why(verse: Path, cli: Cli) -> None:
    words = "plan", verse, "--budget", "10m", "--gpus", "20"
    t4 = *words, "--json", "--gpu", "t4", "--characters", "1e8"
    found = json.loads(cli(*t4).stdout)
    assert [run["gpus"] for run in found["runs"]] == [1, 2, 4, 8, 16, 20]
    assert found["gpus_worth_having"] in (2, 4, 8)
    assert found["runs"][-1]["communication_bytes"] > found["runs"][1]["communication_bytes"] > 0
    shown = cli(*words).stdout
    for part in ("GPUs  parameters", "1 of the 20 GPUs is worth having: 2 compute only", "assumed"):
        assert part in shown
    assert "20 processes are more than the 16 sequences" in shown
    slow = json.loads(cli(*t4, "--link", "0.01").stdout)
    assert slow["gpus_worth_having"] == 1


def test_a_terabyte_on_a_thousand_gpus_is_where_ddp_ends(verse: Path, cli: Cli) -> None:
    shown = cli("plan", verse, *"--characters 1e12 --budget 168h --gpus 1000".split()).stdout
    for part in (
        "about 900G characters",
        "1,000 x H100",
        "DDP, which holds",
        "torchtitan",
        "over 100 GB",
    ):
        assert part in shown


def test_the_table_of_plans_in_the_docs_is_what_the_command_prints(verse: Path, cli: Cli) -> None:
    page = (REPOSITORY / "docs" / "scaling.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| `(--characters .*?)` (.*)$", page)
    assert len(rows) > 5
    for words, written in rows:
        found = json.loads(cli("plan", verse, *words.split(), "--json").stdout)
        run = found["runs"][-1]
        step, sent = (1000 * run[f"{key}_seconds"] for key in ("step", "communication"))
        expected = (
            f"| {run['n_layer']} x {run['n_embd']}, {short(run['parameters'])} | "
            f"{short(run['characters'])} | {size(run['memory_bytes'])} | {step:.1f} ms, "
            f"{sent:.1f} ms | {found['gpus_worth_having']} |"
        )
        assert written == expected, words


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_long_text_is_planned_from_a_sample(
    is_packed: bool, verse: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if is_packed:
        content = verse.read_bytes()
        verse = tmp_path / "verse.gz"
        verse.write_bytes(gzip.compress(content))
    settings = TextConfig(path=str(verse))
    whole = load_corpus(settings)
    monkeypatch.setattr(performance, "MAX_READ_BYTES", 1000)
    size = 10_000 if is_packed else 20_000  # of a chunk
    monkeypatch.setattr(performance, "CHUNK_BYTES", size)
    monkeypatch.setattr("chargpt.text.source.CHUNK_BYTES", size)
    sampled = sample_corpus(settings)
    assert sampled.n_characters <= 20_000 < whole.n_characters
    assert len(sampled.split("train")) == pytest.approx(len(whole.split("train")), rel=0.01)
    plans = [
        plan_on_gpus(Config(), corpus, 600.0, (), GPUS["h100"], 1) for corpus in (whole, sampled)
    ]
    assert plans[0].config.model == plans[1].config.model
