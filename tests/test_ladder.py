"""The ladder from a bigram to a GPT: rungs, confidence intervals, baselines, compressors."""

import itertools
import json
import lzma
import math
import shutil
from pathlib import Path
from statistics import stdev

import pytest
from conftest import Cli, refusal
from noise import bigram_of_counts

from chargpt.analysis.compare import Estimate
from chargpt.analysis.ladder import compressed_losses, compressors, ladder_rungs, ngram_loss
from chargpt.config import load_config
from chargpt.inference.evaluation import Baselines, evaluate, evaluate_tokens
from chargpt.models import build_model, count_parameters
from chargpt.models.ngram import NGRAM, NGRAM_ORDER
from chargpt.store.run import load_run
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus

TINY = (
    "-s train.max_steps=4 -s train.batch_size=4 -s model.n_layer=2 -s model.n_head=2 "
    "-s model.n_embd=16 -s model.block_size=16 -s train.evaluation_tokens=300"
).split()


def corpus_of(path: Path) -> Corpus:
    return load_corpus(load_config("gpt", {"text.path": path}).text)


def val_losses(corpus: Corpus) -> dict[str, float]:
    return Baselines(corpus).losses(corpus.split("val"))


def test_each_rung_of_the_gpt_differs_from_the_one_below_in_one_setting() -> None:
    settings = load_config("ladder")
    rungs = ladder_rungs(settings)
    trees = [rung.config.model.model_dump() for rung in rungs[1:]]
    for below, above in itertools.pairwise(trees):
        assert sum(below[key] != above[key] for key in below) == 1
    assert trees[-1] == settings.model.model_dump()
    sizes = [count_parameters(rung.config.model, 65) for rung in rungs[1:]]
    assert sizes == sorted(sizes)
    for rung in rungs[1:]:
        build_model(rung.config.model, 65)


def test_interval_is_students_t() -> None:
    assert Estimate.from_values([1.5]) == Estimate(1.5, None)
    # (Gosset 1908), from one degree of freedom on
    quantiles = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
    for count, quantile in enumerate(quantiles, 2):
        values = [float(i) for i in range(count)]
        wanted = quantile * stdev(values) / math.sqrt(count)
        assert Estimate.from_values(values).margin == pytest.approx(wanted, rel=1e-3)
    assert Estimate.from_values([0.0, 1.0] * 8).margin == pytest.approx(
        2.262 * stdev([0.0, 1.0] * 8) / 4
    )


@pytest.mark.slow
def test_every_rung_is_trained_with_every_seed(cli: Cli, verse: Path) -> None:
    done = cli("compare", verse, "--ladder", "--seeds", "2", "--json", "--out", "rungs", *TINY)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    trained = [row for row in report["rows"] if row["kind"] == "trained"]
    assert len(trained) == len(ladder_rungs(load_config("ladder"))) == 8
    for number, row in enumerate(trained, 1):
        losses = [
            evaluate(load_run(Path("rungs", f"{number}-{seed}"), device="cpu")).nats_per_char
            for seed in (1337, 1338)
        ]
        assert row["nats_by_seed"] == pytest.approx(losses, abs=1e-6)
        assert row["nats_per_char"] == pytest.approx(sum(losses) / 2, abs=1e-6)
        assert row["bits_per_char"] == pytest.approx(row["nats_per_char"] / math.log(2))
        assert row["margin"] > 0
        assert row["sample"]
    for below, row in itertools.pairwise(trained):
        assert row["gain"]["value"] == pytest.approx(below["nats_per_char"] - row["nats_per_char"])
    heads = {row["model"]: row["nats_per_char"] for row in trained}
    gain = heads["bigram (trained)"] - heads["one head, scaled"]
    assert report["attention_gain"]["value"] == pytest.approx(gain)
    assert Path(report["plot"]).read_text().startswith("<?xml")
    by_name = {row["model"]: row["nats_per_char"] for row in report["rows"]}
    levels = val_losses(corpus_of(verse))
    assert by_name["uniform"] == pytest.approx(levels["uniform"])
    assert by_name[f"{NGRAM} (counts)"] == pytest.approx(levels[NGRAM], abs=1e-6)


def test_table_names_each_added_component(cli: Cli, verse: Path) -> None:
    done = cli("compare", verse, "--ladder", "--out", "rungs", "--plot", "steps.png", *TINY)
    assert done.returncode == 0, done.stderr
    assert "one head, scaled: " in done.stdout
    assert "(scores divided by sqrt(head size))" in done.stdout
    assert "±" not in done.stdout  # a single seed has no interval
    assert "-- + depth --" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "───" in line)
    assert Path("steps.png").read_bytes().startswith(b"\x89PNG")


def test_compressors_are_primed_with_the_training_text(tmp_path: Path, verse: Path) -> None:
    corpus = corpus_of(verse)
    tokens = corpus.split("val")[:501]
    train, val = (corpus.tokenizer.decode(each) for each in (corpus.split("train"), tokens))
    own = len(lzma.compress((train + val).encode(), preset=9)) - len(
        lzma.compress(train.encode(), preset=9)
    )
    losses = compressed_losses(corpus, tokens)
    assert losses["xz -9"] == pytest.approx(8 * math.log(2) * own / 501)
    # a validation split that repeats the training split costs almost nothing
    path = tmp_path / "text.txt"
    path.write_text(verse.read_text(encoding="utf-8") * 10)
    corpus = corpus_of(path)
    repeated = compressed_losses(corpus, corpus.split("val"))
    assert repeated["xz -9"] < 0.02
    assert set(repeated) == set(compressors()) >= {"gzip -9", "bzip2 -9", "xz -9"}
    assert ("zstd -19" in repeated) == (shutil.which("zstd") is not None)


def test_baselines_score_the_same_characters(verse: Path) -> None:
    corpus = corpus_of(verse)
    val = corpus.split("val")[:501]
    levels = Baselines(corpus).losses(val)
    assert ngram_loss(corpus, NGRAM_ORDER, val) == pytest.approx(levels[NGRAM], abs=1e-6)
    bigram = bigram_of_counts(corpus.pair_counts("train"), 1000, alpha=0.1)
    own = evaluate_tokens(bigram, val)
    assert own.characters == 500
    assert levels["bigram"] == pytest.approx(own.nats_per_char, abs=1e-6)
    assert val_losses(corpus)["bigram"] != pytest.approx(levels["bigram"], abs=1e-3)
    assert ngram_loss(corpus, 2, val) > ngram_loss(corpus, 3, val) > ngram_loss(corpus, 4, val)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ladder", "-s", "optim.lr=1,2"], "-s optim.lr=A,B does not apply to --ladder, whose"),
        (["--ladder", "-c", "bigram"], "the ladder needs a gpt with all components"),
        (["--ladder", "-s", "model.n_head=1"], "set model.n_layer and model.n_head to 2 or more"),
        (["--ladder", "-s", "model.qk_norm=false"], "and model.qk_norm at their defaults"),
        (["--models", " , "], "--models names no model; give bigram, gpt or both"),
        (["--ladder", "--models", "gpt"], "--models does not apply to --ladder, whose models are"),
        (["--ladder", "--seeds", "11"], "Invalid value for '--seeds'"),
        (["--ladder", "-s", "model.block_size=9000"], "model.block_size 9,000 needs 9,001 of each"),
        (["--ladder", "--out", "taken"], "taken/8 exists; continue the comparison with"),
    ],
)
def test_invalid_ladder_options_are_rejected(
    cli: Cli, verse: Path, words: list[str], sentence: str
) -> None:
    Path("taken/8").mkdir(parents=True)
    done = cli("compare", verse, *words)
    assert sentence in refusal(done)
    assert "== " not in done.stderr  # nothing was trained
