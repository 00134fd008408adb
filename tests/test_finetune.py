"""Fine-tuning: a run that starts from the weights of another, by character."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Cli, refusal, run_here
from noise import fill_with_noise, noisy_run_on
from saving import rewrite

from chargpt.config import Config, ModelConfig
from chargpt.models import build_model
from chargpt.models.ngram import BigramLM
from chargpt.store.checkpoint import RunState
from chargpt.store.folder import RunFolder
from chargpt.store.metrics import validation_curve
from chargpt.store.run import Run, load_run
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training.finetune import copy_weights, forgetting

SMALL = ("-s", "model.n_layer=1", "-s", "model.n_embd=32", "-s", "model.block_size=16")
STEPS = ("-s", "train.max_steps=60", "-s", "train.evaluation_tokens=500")
FIRST, SECOND = "the cat sat on the mat\n" * 200, "my own cat sat on ten maps\n" * 100


@pytest.mark.parametrize("kind", ["gpt", "bigram"])
@pytest.mark.parametrize("has_bytes", [False, True])
def test_the_logits_of_shared_tokens_are_those_of_the_run(kind: str, has_bytes: bool) -> None:
    old = CharTokenizer("\nacemt", has_bytes=has_bytes)
    new = CharTokenizer("\n abcdemstz", has_bytes=has_bytes)
    config = Config(model=ModelConfig(kind=kind, n_layer=2, n_embd=8, n_head=2, block_size=8))
    source = fill_with_noise(build_model(config.model, old.vocab_size)).eval()
    model = fill_with_noise(build_model(config.model, new.vocab_size), seed=2).eval()
    copy_weights(model, new, Run(Path("run"), config, old, source, 1, RunState(1)))
    text = "tea\nmat"
    logits = model(torch.from_numpy(new.encode(text).astype("int64"))[None])[0]
    expected = source(torch.from_numpy(old.encode(text).astype("int64"))[None])[0]
    shared = [int(new.encode(character)[0]) for character in old.characters]
    assert torch.allclose(logits[:, shared], expected[:, : len(shared)], atol=1e-5)
    added = int(new.encode("z")[0])
    assert torch.allclose(logits[:, added], expected.mean(dim=1), atol=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "first.txt").write_text(FIRST)
    run_here("train", "first.txt", *SMALL, *STEPS, "--out", "first", cwd=folder)
    return folder / "first"


@pytest.fixture
def first(trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on the first text."""
    Path("second.txt").write_text(SECOND)
    return Path(shutil.copytree(trained, "first"))


def test_a_run_starts_from_another_and_says_what_that_one_forgets(first: Path, cli: Cli) -> None:
    extra = ("-s", "text.extra_characters=é", "--out", "second", "--json")
    done = cli("train", "second.txt", "--from", first, *STEPS, *extra)
    assert done.returncode == 0, done.stderr
    assert "11 of the 15 tokens are known, 4 new" in done.stderr
    old, new = load_run("first"), load_run("second")
    assert new.config.model == old.config.model
    assert new.config.optim.lr == pytest.approx(0.1 * old.config.optim.lr)
    assert set(new.tokenizer.characters) == {*FIRST, *SECOND, "é"}
    records = [json.loads(line) for line in Path("second/metrics.jsonl").read_text().splitlines()]
    (_, at_start), *_ = validation_curve(records)
    assert at_start < 2.5  # ln 15 = 2.71 for random weights
    on_first = json.loads(cli("evaluate", "first", "--json").stdout)
    forgotten = json.loads(done.stdout)["forgetting"]
    assert forgotten["before"] == pytest.approx(on_first["nats_per_char"])
    assert forgotten["after"] > forgotten["before"]
    assert (forgotten["characters"], forgotten["n_unknown"]) == (on_first["characters"], 0)


def test_forgetting_is_measured_on_the_same_characters_whatever_the_blocks(tmp_path: Path) -> None:
    text = "".join(np.random.default_rng(0).choice([*"abcdefgh\n"], 5000))
    run = noisy_run_on(tmp_path, text, **{"train.evaluation_tokens": 100})
    runs = list[Run]()
    for block_size in (32, 8):  # a bigram model's loss does not depend on them
        model = fill_with_noise(BigramLM(run.tokenizer.vocab_size, block_size)).eval()
        runs.append(replace(run, model=model))
    found = forgetting(*runs)
    assert found is not None
    assert found.before == pytest.approx(found.after)


def test_one_file_can_follow_a_run_whose_documents_are_files(cli: Cli) -> None:
    Path("poems").mkdir()
    for number in range(20):
        Path("poems", f"{number}.txt").write_text(f"poem {number}: the sea\n" * 20)
    cli("train", "poems", *SMALL, *STEPS, "-s", "text.documents=files", "--out", "base")
    for text, documents in (("poems/1.txt", None), ("poems", "files")):
        done = cli("train", text, *STEPS, "--from", "base", "--out", "tuned", "--force")
        assert done.returncode == 0, done.stderr
        assert load_run("tuned").config.text.documents == documents


def test_a_run_from_one_of_documents_has_documents_too(cli: Cli) -> None:
    Path("first.txt").write_text("ä\n" + FIRST)  # ä occurs once: it is spelled as bytes
    Path("second.txt").write_text(SECOND)
    Path("short.txt").write_text("the cat\n" * 20)  # a validation split of 16 tokens
    settings = ("-s", "text.documents=lines", "-s", "text.min_count=2")
    assert cli("train", "first.txt", *SMALL, *STEPS, *settings, "--out", "first").returncode == 0
    done = cli("train", "short.txt", "--from", "first", *STEPS, "--out", "short")
    assert done.returncode == 0, done.stderr
    config = load_run("short").config
    assert (config.text.documents, config.model.block_size) == ("lines", 8)
    plain = ("-s", "text.documents=null", "--out", "plain")
    done = cli("train", "second.txt", "--from", "first", *STEPS, *plain)
    assert done.returncode == 0, done.stderr
    assert load_run("plain").config.text.documents is None


def test_a_fine_tuned_run_is_resumed_without_the_other(first: Path, cli: Cli) -> None:
    done = cli("train", "second.txt", "--from", first, *STEPS, "--out", "second")
    assert "On first.txt, the text of " in done.stdout
    assert "nats per character before training" in " ".join(done.stdout.split())
    shutil.rmtree(first)
    done = cli("train", "--resume", "second", "-s", "train.max_steps=70")
    assert done.returncode == 0, done.stderr
    assert load_run("second", "latest").step == 70


def test_another_model_than_that_of_the_run_is_refused(first: Path, cli: Cli) -> None:
    train = ("train", "second.txt", "--from", first, *STEPS, "--out", "second")
    said = " ".join(refusal(cli(*train, "-s", "model.n_layer=2")).split())
    assert "model.n_layer is 1 in " in said
    assert "drop -s model.n_layer=2" in said
    assert cli(*train, "-s", "model.block_size=8").returncode == 0  # rotary: any block size


def test_a_budget_keeps_the_model_of_the_run(first: Path, cli: Cli) -> None:
    done = cli("train", "second.txt", "--from", first, "--budget", "5s", "--out", "second")
    assert done.returncode == 0, done.stderr
    assert "the model size is given" in done.stderr
    assert load_run("second").config.model.n_embd == 32
    missing = cli("train", "second.txt", "--from", "nowhere", "--out", "third")
    assert "nowhere" in refusal(missing)


def test_a_pull_towards_the_old_weights_forgets_less(first: Path, cli: Cli) -> None:
    train = ("train", "second.txt", "--from", first, *STEPS, "--json")
    after = []
    for pull in (0, 0.05):
        done = cli(*train, "-s", f"optim.l2_sp={pull}", "--out", f"pull-{pull}")
        assert done.returncode == 0, done.stderr
        after.append(json.loads(done.stdout)["forgetting"]["after"])
    assert after[1] < after[0] - 0.05
    resume = ("train", "--resume", "pull-0.05", "-s")
    assert cli(*resume, "train.max_steps=70").returncode == 0
    shutil.rmtree(first)
    assert "first" in refusal(cli(*resume, "train.max_steps=80"))
    alone = cli("train", "second.txt", "-s", "optim.l2_sp=0.1", "--out", "alone")
    assert "train.from_run" in refusal(alone)


def test_a_pull_towards_weights_that_have_changed_is_not_resumed(first: Path, cli: Cli) -> None:
    train = ("train", "second.txt", "--from", first, *STEPS, "-s", "optim.l2_sp=0.5")
    assert cli(*train, "--out", "pulled").returncode == 0
    resume = ("train", "--resume", "pulled", "-s", "train.max_steps=61")
    shutil.copytree(first, "as-it-was")
    assert cli("train", "--resume", first, "-s", "train.max_steps=120").returncode == 0
    message = refusal(cli(*resume))
    assert "first, towards whose weights optim.l2_sp pulls, has changed since pulled" in message
    shutil.copytree("pulled", "earlier")
    checkpoint = RunFolder(Path("earlier")).load("latest").folder
    state = json.loads((checkpoint / "state.json").read_text())
    assert len(state.pop("base_fingerprint")) == 16
    rewrite(checkpoint, "state.json", json.dumps(state).encode())
    earlier = cli("train", "--resume", "earlier", "-s", "train.max_steps=61")
    assert earlier.returncode == 0, earlier.stderr
    shutil.rmtree(first)
    Path("as-it-was").rename(first)
    resumed = cli(*resume)
    assert resumed.returncode == 0, resumed.stderr


def test_a_fine_tuned_run_is_compared_with_a_fresh_one(first: Path, cli: Cli) -> None:
    cli("train", "second.txt", "--from", first, *STEPS, "--out", "second")
    cli("train", "second.txt", *SMALL, *STEPS, "--out", "fresh")
    done = cli("compare", "fresh", "second", "--json")
    assert done.returncode == 0, done.stderr
    assert {"fresh", "second"} <= {row["model"] for row in json.loads(done.stdout)["rows"]}
    assert cli("compare", first, "second").returncode == 2  # another text
