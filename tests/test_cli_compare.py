"""`chargpt compare`: models that it trains, and existing runs."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Cli, refusal
from shared_runs import EVALUATION_KEYS, QUICK, RARE

from chargpt.analysis import compare as comparison
from chargpt.analysis.compare import Comparison, Row, compare_runs
from chargpt.analysis.result import MIXTURE_SUFFIX
from chargpt.cli.compare import print_rows
from chargpt.config import load_config
from chargpt.inference.evaluation import Baselines, evaluate_tokens
from chargpt.store.folder import RunFolder
from chargpt.store.run import load_run


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


def test_compare_trains_within_a_budget(verse: Path, cli: Cli) -> None:
    small = ("-s", "model.n_layer=1", "-s", "model.n_embd=16", "-s", "model.block_size=16")
    budget = ("--budget", "6s", *small, "--device", "cpu", "--seed", "3")
    done = cli("compare", verse, *budget, "-o", "both", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["model"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["gpt (trained)"]["nats_per_char"] < rows["unigram (counts)"]["nats_per_char"]
    config = load_config("both/gpt/config.yaml")
    assert config.seed == 3
    assert config.train.max_steps != load_config("gpt").train.max_steps  # planned


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
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = trained.parent / "novel.txt"
    for name, seed in (("a", "1"), ("b", "2")):
        assert cli("train", text, *QUICK, "--seed", seed, "-o", f"runs/{name}").returncode == 0
    RunFolder(Path("runs/a")).metrics.append({"step": 7, "loss": 9.0, "seconds": 1234.5})
    report = json.loads(cli("compare", "runs", "runs/a", "runs/../runs/b", "--json").stdout)
    in_runs = [row for row in report["rows"] if row["run"]]
    assert [row["model"] for row in in_runs] == ["a", "b"]
    assert in_runs[0]["seconds"] == 1234.5, "steps after the best checkpoint take time too"
    a, b = (load_run(f"runs/{name}") for name in "ab")
    tokens = a.corpus().split("val")
    of_a, of_b = (evaluate_tokens(run.model, tokens) for run in (a, b))
    rows = [
        Row(f"a{MIXTURE_SUFFIX}", replace(of_a, nats_per_char=of_a.nats_per_char - 1), run="a"),
        Row("a", of_a, 1, run="a"),
        Row("b", of_b, 1, run="b"),
        Row("bigram (counts)", Baselines(a.corpus()).evaluate(tokens)["bigram"]),
    ]
    printed: list[str] = []
    monkeypatch.setattr("chargpt.cli.console.out_sentence", printed.append)
    curves = {"a": [(0, 4.0), (5, 2.0), (9, 2.5)], "b": [(0, 4.0), (5, 2.0), (9, 2.01)]}
    print_rows(Comparison("text", 10, 5, 10, rows, curves))
    of_models, of_all = [each for each in printed if "has the lowest loss" in each]
    assert " has the lowest loss of the models alone; " in of_models
    assert of_all.startswith(f"a{MIXTURE_SUFFIX} has the lowest loss of the runs and their ")
    assert " b " in f"{of_all} ".replace("(", " ")
    shown = [line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines()[-2:]]
    at_best = "4.000 -> 2.000 at step 5"  # the checkpoint that the table scores
    assert shown == [["a", f"{at_best}, last 2.500"], ["b", at_best]]
