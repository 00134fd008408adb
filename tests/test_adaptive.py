"""The protocol `adaptive`: a mixture that learns from the text that it predicts."""

import itertools
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, Cli, refusal

import chargpt
from chargpt.inference import coding
from chargpt.inference.coding import MAX_ADAPTIVE_LANES, compress, decompress, split_into_lanes
from chargpt.inference.scoring import score, token_losses
from chargpt.store.mixture import with_mixture
from chargpt.store.run import Run
from chargpt.training.adaptive import AdaptiveDecoder, adaptive_losses

SENTENCES = ("ORLA: Seven gulls sat by the lamp.\n", "NED: No boat has come tonight, Orla.\n")
LIGHTHOUSE = (REPOSITORY / "data" / "lighthouse.txt").read_text(encoding="utf-8")
NEW = "".join(SENTENCES[i % 7 % 2] for i in range(60))  # what the run has not read, repeated


@pytest.fixture
def run(mixed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A copy of the run, with its mixture, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(mixed_run, "run")
    return with_mixture(chargpt.load_run("run", device="cpu"))


def test_what_is_read_is_learnt_and_the_run_stays_as_it_is(run: Run) -> None:
    key, tokens = run.fingerprint(), run.tokenizer.encode(NEW)
    model_before = [parameter.clone() for parameter in run.model.parameters()]
    adaptive, static = adaptive_losses(run, tokens), token_losses(run, tokens)
    assert adaptive[:15] == pytest.approx(static[:15], abs=1e-4)  # nothing is learnt yet
    assert adaptive[len(NEW) // 2 :].mean() < static[len(NEW) // 2 :].mean() - 0.3
    assert run.fingerprint() == key
    for before, after in zip(model_before, run.model.parameters(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("place", [1, 17, 64, 200])
def test_a_prediction_depends_only_on_what_was_before(run: Run, place: int) -> None:
    tokens = run.tokenizer.encode(NEW[:300])
    changed = np.concatenate((tokens[:place], np.random.default_rng(0).permutation(tokens[place:])))
    before, after = adaptive_losses(run, tokens), adaptive_losses(run, changed)
    assert np.array_equal(before[: place - 1], after[: place - 1])
    assert not np.allclose(before[place - 1 :], after[place - 1 :])


@pytest.mark.parametrize("text", [NEW, LIGHTHOUSE[8000:]], ids=["new", "of the training split"])
def test_the_decoder_predicts_from_the_context_that_the_mixture_learns_with(
    run: Run, text: str
) -> None:
    tokens = run.tokenizer.encode(text[:176])  # whole half blocks
    decoder, found = AdaptiveDecoder(run, 1), []
    for token, following in itertools.pairwise(tokens.astype(np.int64)):
        logits = decoder.step(np.array([token]))[0].astype(np.float64)
        found.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[following])
    np.testing.assert_allclose(found, adaptive_losses(run, tokens), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length", [0, 1, 17, 33, 200])
def test_the_size_of_a_compressed_text_is_its_adaptive_loss(run: Run, length: int) -> None:
    text = NEW[:length]
    decoder = partial(AdaptiveDecoder, run)
    packed = compress(run, text.encode(), adaptive=decoder)
    assert decompress(run, packed, adaptive=decoder) == text.encode()
    if length > 100:
        bits = adaptive_losses(run, run.tokenizer.encode(text)).sum() / np.log(2)
        assert 8 * len(packed) == pytest.approx(bits, rel=0.02, abs=8 * 64)
        assert len(packed) < 0.9 * len(compress(run, text.encode()))


def test_several_lanes_are_restored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "MIN_LANE_TOKENS", 60)
    text = NEW[:260]
    decoder = partial(AdaptiveDecoder, run)
    packed = compress(run, text.encode(), adaptive=decoder)
    assert len(split_into_lanes(run.tokenizer.encode(text), MAX_ADAPTIVE_LANES)) == 4
    assert decompress(run, packed, adaptive=decoder) == text.encode()


@pytest.mark.slow
def test_the_commands_adapt_if_asked(run: Run, cli: Cli) -> None:
    Path("new.txt").write_text(NEW)
    shown = {
        words: json.loads(cli("score", "run", "new.txt", "--json", *words).stdout)
        for words in ((), ("--mixture",), ("--adaptive",))
    }
    assert [facts["protocol"] for facts in shown.values()] == ["sliding", "sliding", "adaptive"]
    assert shown["--adaptive",]["bits_per_char"] < shown["--mixture",]["bits_per_char"] - 0.3
    scored = score(run, NEW, adaptive_losses=adaptive_losses)
    assert shown["--adaptive",]["bits_per_char"] == pytest.approx(scored.bits_per_char, rel=1e-4)
    Path("part.txt").write_text(NEW[:300])
    for words, name in (((), "a.cgpt"), (("--adaptive",), "b.cgpt")):
        done = cli("compress", "run", "part.txt", name, *words)
        assert done.returncode == 0, done.stderr
        back = cli("decompress", "run", name, name + ".txt")
        assert back.returncode == 0, back.stderr
        assert Path(name + ".txt").read_text() == NEW[:300]
    assert Path("b.cgpt").stat().st_size < Path("a.cgpt").stat().st_size
    Path("run", "mixture.safetensors").unlink()
    assert "mixture.safetensors is missing" in refusal(cli("score", "run", "new.txt", "--adaptive"))
