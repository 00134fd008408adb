"""`chargpt compare`: models that it trains, and existing runs."""

import csv
import itertools
import json
import math
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from conftest import REPOSITORY, Cli, refusal, run_here
from shared_runs import EVALUATION_KEYS, QUICK, RARE

from chargpt.analysis import compare as comparison
from chargpt.analysis.compare import compare_runs
from chargpt.analysis.result import MIXTURE_SUFFIX
from chargpt.cli.compare import print_conclusions, runs_in
from chargpt.config import Config, load_config, split_values
from chargpt.inference.evaluation import evaluate
from chargpt.store.folder import RunFolder
from chargpt.store.run import load_run
from chargpt.training import trainer as trainer_module
from chargpt.training.trainer import StepReport, Trainer


def test_compare_trains_and_compares_bigram_and_gpt(verse: Path, cli: Cli) -> None:
    done = cli("compare", verse, *QUICK, "--out", "both")
    assert done.returncode == 0, done.stderr
    for word in (
        "uniform", "unigram (counts)", "bigram (counts)", "bigram (trained)", "gpt (trained)",
        "parameters", "the gpt is", "best bigram", "plot: both/curves.svg",
    ):  # fmt: skip
        assert word in done.stdout, word
    picture = Path("both/curves.svg").read_text()
    assert "gpt (trained)" in picture
    assert "bigram (trained)" in picture
    again = cli("compare", "both/bigram", "both/gpt")
    assert "6-gram (counts)" in again.stdout
    assert re.search(
        r"(gpt|bigram) has the lowest loss of the runs; it is .*"
        r"(better than|not distinguishable from) (bigram|gpt)",
        again.stdout.replace("\n", " "),
    )
    again = cli("compare", "both/bigram", "both/gpt", "--json", "--plot", "two.png")
    rows = json.loads(again.stdout)["rows"]
    assert [row["model"] for row in rows if row["run"]] == ["bigram", "gpt"]
    of_a_file = {"chars_per_second", "evaluation_seconds", "of_characters", "text"}
    assert EVALUATION_KEYS - of_a_file <= set(rows[-1])
    assert Path("two.png").read_bytes().startswith(b"\x89PNG")


def test_compared_models_are_configs_named_by_their_files(verse: Path, cli: Cli) -> None:
    Path("wide.yaml").write_text("model: {n_layer: 1, n_embd: 24}\noptim: {lr: 0.007}\n")
    given = ("-s", "train.max_steps=3", "-s", "model.block_size=16")
    done = cli("compare", verse, "-c", "wide.yaml", *given, "--out", "two")
    assert [run.name for run in runs_in(Path("two"))] == ["bigram", "wide"]
    assert "the wide is" in done.stdout, done.stderr
    assert "wide (trained)" in done.stdout
    changed = ("-s", "model.mlp=none", "--models", "wide.yaml, head, gpt", "--out", "three")
    cli("compare", verse, "-c", "wide.yaml", *given, *changed)
    configs = {run.name: load_config(run / "config.yaml") for run in runs_in(Path("three"))}
    found = {
        name: (each.model.n_embd, each.model.mlp, each.optim.lr) for name, each in configs.items()
    }
    assert found == {
        "gpt": (128, "swiglu", 0.02), "head": (64, "none", 0.02), "wide": (24, "none", 0.007)
    }  # fmt: skip
    assert {(each.train.max_steps, each.model.block_size) for each in configs.values()} == {(3, 16)}
    message = refusal(cli("compare", verse, "--models", "heads"))
    assert message.endswith("there is no config 'heads'; did you mean head?")
    train = "train: {max_steps: 99, ngram_target_weight: 0.5}\n"
    Path("long.yaml").write_text(f"model: {{n_layer: 1, block_size: 32}}\n{train}")
    done = cli("compare", verse, "--models", "long.yaml", *given, "--out", "four")
    unused = "long.yaml: not used, since all models share them: train.max_steps, model.block_size"
    assert unused in done.stderr
    assert load_config("four/long/config.yaml").train.ngram_target_weight == 0.5
    Path("wide").mkdir()
    Path("wide/wide.yaml").touch()
    same = refusal(cli("compare", verse, "--models", "wide.yaml,wide/wide.yaml"))
    assert "have the same name" in same


def test_an_interrupted_comparison_names_the_runs_that_it_has(
    verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("chargpt.analysis.compare.prepare", interrupted)
        done = cli("compare", verse, *QUICK, "--out", "none")
        assert (done.returncode, "the runs so far" in done.stderr) == (130, False)
    with monkeypatch.context() as patch:
        patch.setattr("chargpt.analysis.compare.try_add_mixture", interrupted)
        done = cli("compare", verse, *QUICK, "--out", "both")
        assert done.returncode == 130
    assert "`chargpt compare both` scores them" in done.stderr
    assert cli("compare", "both").returncode == 0


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep of two learning rates with two seeds each; only read it."""
    folder = tmp_path_factory.mktemp("sweep")
    rates = ("-s", "optim.lr=0.01, 2e-1", "--seeds", "2", "-s", "text.test_fraction=0.1")
    outputs = ("--out", "both", "--csv", "rows.csv")
    run_here(
        "compare", REPOSITORY / "data" / "lighthouse.txt", *QUICK, *rates, *outputs, cwd=folder
    )
    return folder


def test_lists_of_values_train_each_combination_named_by_what_differs(sweep: Path) -> None:
    runs = {run.name: load_config(run / "config.yaml") for run in runs_in(sweep / "both")}
    assert {name: (each.optim.lr, each.seed) for name, each in runs.items()} == {
        "lr=0.01-1337": (0.01, 1337), "lr=0.01-1338": (0.01, 1338),
        "lr=2e-1-1337": (0.2, 1337), "lr=2e-1-1338": (0.2, 1338),
    }  # fmt: skip
    first = runs["lr=0.01-1337"]
    assert all(set(each.differing_keys(first)) <= {"optim.lr", "seed"} for each in runs.values())
    for written in ("text.suffixes=.py,.txt", "optim.lr"):
        assert split_values(written) == [written]


def test_seeds_give_mean_deviation_and_a_difference_paired_by_seed(sweep: Path, cli: Cli) -> None:
    report = json.loads(cli("compare", sweep / "both", "--json").stdout)
    nats = [
        [evaluate(sweep / "both" / f"lr={lr}-{seed}").nats_per_char for seed in (1337, 1338)]
        for lr in ("0.01", "2e-1")
    ]
    for model, lr, losses in zip(report["models"], ("0.01", "2e-1"), nats, strict=True):
        assert (model["model"], model["seeds"]) == (f"lr={lr} (2 seeds)", [1337, 1338])
        assert model["nats_per_char"] == pytest.approx(mean(losses))
        assert model["bits_per_char"] == pytest.approx(mean(losses) / math.log(2))
        assert model["std"] == pytest.approx(stdev(losses))
    gains = [a - b for a, b in zip(*nats, strict=True)]
    half = 12.706 * stdev(gains) / math.sqrt(2)
    assert f"{abs(mean(gains)):.3f} ± {half:.3f} nats" in report["summary"][-2]
    assert report["summary"][-1] == comparison.PLUS_MINUS_OF_SEEDS
    seeds = ((1, 5), (1, 6), (2, 5), (2, 6), (3, 5), (3, 5))  # the last two repeat one
    configs = [Config().with_values({"optim.lr": lr, "seed": seed}) for lr, seed in seeds]
    models = comparison.group_seeds(["g-5", "g-6", "g-5", "b", "c", "d"], configs)
    assert models == [*2 * ["g (2 seeds)"], *2 * ["g-5 (2 seeds)"], "c", "d"]
    # a run without its own seed in the other model has no interval
    two = [sweep / "both" / name for name in ("lr=0.01-1337", "lr=0.01-1338", "lr=2e-1-1337")]
    printed = cli("compare", *two).stdout.replace("\n", " ")
    assert "(too few common seeds for an interval)" in printed
    assert f"{stdev(nats[0]):.4f}" in printed


def test_csv_has_the_json_row_of_each_run_and_baseline(sweep: Path, cli: Cli) -> None:
    written = (sweep / "rows.csv").read_text()
    rows = list(csv.DictReader(written.splitlines()))
    done = cli("compare", sweep / "both", "--json", "--csv", "again.csv")
    printed = json.loads(done.stdout)["rows"]
    again = list(csv.DictReader(Path("again.csv").read_text().splitlines()))
    assert len(rows) == len(again) == len(printed) == 4 + 4
    for row, expected in zip(again, printed, strict=True):
        assert row == {key: "" if (v := expected[key]) is None else str(v) for key in row}
    assert [row["nats_per_char"] for row in rows[:4]] == [row["nats_per_char"] for row in again[:4]]
    models = [(row["model"], row["seed"]) for row in rows[4:]]
    assert models == [(f"lr={lr}", s) for lr in ("0.01", "2e-1") for s in ("1337", "1338")]
    message = refusal(cli("compare", sweep / "both", "--csv", "again.csv"))  # rows may be added
    assert "again.csv exists; delete it, or name another" in message
    assert cli("compare", sweep / "both", "--csv", "-").stdout == Path("again.csv").read_text()


def test_the_test_split_is_scored_on_request(sweep: Path, cli: Cli) -> None:
    done = cli("compare", sweep / "both", "--split", "test")
    assert "loss on 2,843 of 2,844 test characters" in done.stdout
    rows = json.loads(cli("compare", sweep / "both", "--split", "test", "--json").stdout)["rows"]
    for row in rows[4:]:
        assert row["split"] == "test"
        assert row["nats_per_char"] == pytest.approx(evaluate(row["run"], "test").nats_per_char)


@pytest.mark.parametrize(
    ("words", "stopped_at", "scored"),
    [
        (("--seeds", "2", "-s", "text.mixture_characters=800"), 6 + 6 + 6 + 4, "gpt-1337"),
        pytest.param(("--ladder", "-s", "model.n_layer=2"), 6 + 4, "1", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_comparison_continues_to_the_same_bits(
    words: tuple[str, ...], stopped_at: int, scored: str, verse: Path, cli: Cli
) -> None:
    real, steps = Trainer.train_step, itertools.count(1)

    def interrupted(trainer: Trainer) -> StepReport:
        if next(steps) == stopped_at:
            signal.raise_signal(signal.SIGINT)
        return real(trainer)

    done = cli("compare", verse, *QUICK, *words, "--out", "whole", "--json")
    whole = json.loads(done.stdout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", interrupted)
        patch.setattr("chargpt.text.prepare.KEY_VERSION", 1)  # as of an earlier version
        stopped = cli("compare", verse, *QUICK, *words, "--json", "--out", "parts")
    assert stopped.returncode == 130
    command = shlex.split(stopped.stderr.strip().splitlines()[-1])
    assert command[:2] == ["chargpt", "compare"]
    before = (Path("parts") / scored / "metrics.jsonl").read_bytes()
    done = cli(*command[1:])
    parts = json.loads(done.stdout)
    assert (Path("parts") / scored / "metrics.jsonl").read_bytes() == before  # not trained again
    for row in whole["rows"] + parts["rows"]:
        row |= {"seconds": None, "run": None}
    assert parts["rows"] == whole["rows"]
    for run in runs_in(Path("whole")):
        weights, others = (load_run(Path(each, run.name)) for each in ("whole", "parts"))
        assert weights.fingerprint() == others.fingerprint()
    changed = cli(*command[1:], "-s", "train.batch_size=8")
    assert "differs from this comparison in train.batch_size" in refusal(changed)
    assert cli(*command[1:], "-s", "train.micro_batches=2").returncode == 0  # as where memory ends


def test_compare_trains_within_a_budget(verse: Path, cli: Cli) -> None:
    small = ("-s", "model.n_layer=1", "-s", "model.n_embd=16", "-s", "model.block_size=16")
    budget = ("--budget", "6s", *small, "--device", "cpu", "--seed", "3")
    done = cli("compare", verse, *budget, "-o", "both", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["model"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["gpt (trained)"]["nats_per_char"] < rows["unigram (counts)"]["nats_per_char"]
    config = load_config("both/gpt/config.yaml")
    assert config.seed == 3
    # planned, for a short run; the number of steps may be that of the config by chance
    assert config.train.evaluation_tokens < load_config("gpt").train.evaluation_tokens


def test_runs_of_other_block_sizes_score_the_same_characters_and_name_them(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("-s", "model.block_size=8", "--out", "short")
    assert cli("train", trained.parent / "novel.txt", *QUICK, *settings).returncode == 0
    monkeypatch.setattr(comparison, "MAX_TOKENS", 1000)
    shown = []

    @contextmanager
    def show_progress(_unit: str, label: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: shown.append((label, done, total))

    result = compare_runs([trained, Path("short")], "cpu", show_progress)
    assert shown[0][0] == f"scored, {trained.name}"
    assert shown[-1][:2] == ("scored, short", 992)  # 62 spans of the longer block
    assert {each.characters for each in result.evaluations.values()} == {992}
    assert result.scored_on == "992 of 2,844 validation characters, protocol blocks"
    sentences = comparison.conclusions(result)
    assert any(f"{trained.name} 16, short 8 (a larger" in each for each in sentences)
    clusters = [each.clusters for each in result.evaluations.values()]
    assert clusters[0].shape == clusters[1].shape  # by spans of the longer one: paired
    assert result.curve_baselines.keys() == result.baselines.keys()
    assert result.curve_baselines != result.baselines
    printed = json.loads(cli("compare", trained, "short", "--json").stdout)
    assert printed["summary"] == sentences
    assert printed["plot"] is None
    assert not list(trained.parent.rglob("*.svg"))
    # of models trained on one text, the mixture is named beside its GPT
    gpt, mixture = result.rows[-2:]
    rows = [replace(gpt, model="gpt (trained)"), replace(mixture, model="gpt + n-grams")]
    named = comparison.conclusions(replace(result, rows=[*result.rows[:-2], *rows]))
    assert any(each.startswith("gpt + n-grams, which chargpt sample --mix") for each in named)


def test_runs_of_different_vocabularies_score_the_same_start_of_the_split(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = trained.parent / "novel.txt"
    assert cli("train", text, *QUICK, *RARE, "--out", "rare").returncode == 0
    monkeypatch.setattr(comparison, "MAX_TOKENS", 1000)
    result = compare_runs([trained, Path("rare")], "cpu")
    assert load_run("rare").tokenizer != load_run(trained).tokenizer
    assert {each.characters for each in result.evaluations.values()} == {1000}
    monkeypatch.chdir("rare")
    rows = json.loads(cli("compare", ".", trained, "--json").stdout)["rows"]
    assert [row["model"] for row in rows if row["run"]] == ["rare", trained.name]


def test_runs_of_other_texts_or_splits_are_not_compared(trained: Path, cli: Cli) -> None:
    Path("other.txt").write_text("another text altogether. " * 200)
    assert cli("train", "other.txt", *QUICK, "--out", "other").returncode == 0
    message = refusal(cli("compare", trained, "other"))
    assert "another validation split" in message
    assert "name runs of one text" in message
    assert "other settings: text.path)" in message
    split = ("-s", "text.val_fraction=0.2", "--out", "split")
    assert cli("train", trained.parent / "novel.txt", *QUICK, *split).returncode == 0
    message = refusal(cli("compare", trained, "split"))
    assert "(other settings: text.val_fraction)" in message


def test_compare_takes_a_folder_of_runs_and_compares_each_run_once(
    trained: Path, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    text = trained.parent / "novel.txt"
    for name, lr in (("a", "0.01"), ("b", "0.02")):
        rate = ("-s", f"optim.lr={lr}", "-o", f"runs/{name}")
        assert cli("train", text, *QUICK, *rate).returncode == 0
    RunFolder(Path("runs/a")).metrics.append({"step": 7, "loss": 9.0, "seconds": 1234.5})
    report = json.loads(cli("compare", "runs", "runs/a", "runs/../runs/b", "--json").stdout)
    in_runs = [row for row in report["rows"] if row["run"]]
    assert [row["model"] for row in in_runs] == ["a", "b"]
    assert in_runs[0]["seconds"] == 1234.5, "steps after the best checkpoint take time too"
    result = compare_runs([Path("runs/a"), Path("runs/b")], "cpu")
    *_, a, _ = result.rows
    better = replace(result.evaluations["a"], nats_per_char=a.nats_per_char - 1)
    mixture = replace(a, model=f"a{MIXTURE_SUFFIX}", evaluation=better, parameters=None)
    curves = {"a": [(0, 4.0), (5, 2.0), (9, 2.5)], "b": [(0, 4.0), (5, 2.0), (9, 2.01)]}
    result = replace(result, rows=[*result.rows, mixture], curves=curves, samples={})
    capfd.readouterr()
    print_conclusions(result)
    conclusions = comparison.conclusions(result)
    of_models, of_all = [each for each in conclusions if "has the lowest loss" in each]
    assert " has the lowest loss of the models alone; " in of_models
    assert of_all.startswith(f"a{MIXTURE_SUFFIX} has the lowest loss of the runs and their ")
    assert " b " in f"{of_all} ".replace("(", " ")
    shown = [line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines()[-2:]]
    at_best = "4.000 -> 2.000 at step 5"  # the checkpoint that the table scores
    assert shown == [["a", f"{at_best}, last 2.500"], ["b", at_best]]


def test_all_runs_of_a_comparison_have_what_the_first_has_measured(
    verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = itertools.cycle([(torch.bfloat16, ""), (torch.float32, "")])  # as on a busy machine

    def choose_dtype(device: torch.device, name: str) -> tuple[torch.dtype, str]:
        return next(timed) if name == "auto" else (getattr(torch, name), "")

    monkeypatch.setattr(trainer_module, "choose_dtype", choose_dtype)
    done = cli("compare", verse, *QUICK, "-s", "dtype=auto", "--out", "both")
    assert done.returncode == 0, done.stderr
    assert {load_run(f"both/{kind}").config.dtype for kind in ("bigram", "gpt")} == {"bfloat16"}
