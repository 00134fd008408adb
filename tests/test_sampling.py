"""Text is drawn as stated: the same by every path, filtered, stopped, and never without end."""

import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, run_cli
from formula import logits_of_long_text
from hypothesis import example, given, settings
from hypothesis import strategies as st
from noise import noisy_model

from chargpt.cli import console
from chargpt.cli.sample import write_texts
from chargpt.config import Config, SampleConfig
from chargpt.errors import ConfigError, UnknownCharacterError, WorkError
from chargpt.inference import decoder, sampling
from chargpt.inference.compiled_decoder import CompiledDecoder
from chargpt.inference.drawing import draw, probabilities, side_by_side, uniforms
from chargpt.inference.numpy_decoder import NumpyDecoder
from chargpt.inference.sampling import sample, stream, stream_run
from chargpt.models.bigram import BigramLM
from chargpt.store.run import Run
from chargpt.store.state import RunState
from chargpt.text.corpus import load_corpus
from chargpt.text.tokenizer import CharTokenizer

LETTERS = CharTokenizer("\n abcdefgh")  # 10 characters and a newline's worth
NO_NEWLINE = CharTokenizer("abcdefghijk")


def written(model, prompt="", tokenizer=NO_NEWLINE, streams=None, **options):
    """Return each stream's whole text, without the prompt."""
    settings = SampleConfig(**{"length": 40, "seed": 5, "temperature": 1.0} | options)
    steps = stream(model, tokenizer, tokenizer.encode(prompt), settings, streams=streams)
    return ["".join(pieces) for pieces in zip(*steps, strict=True)]


@pytest.mark.parametrize("block_size", [1, 2, 3, 12])
@pytest.mark.parametrize("prompt", ["a", "abcabcabcabcabcabc"])
@pytest.mark.parametrize("rung", [{}, {"attention": "average"}, {"attention": "none"}])
def test_greedy_text_is_what_the_formula_thinks_likeliest(block_size, prompt, rung):
    model = noisy_model(block_size=block_size, **rung)
    text = prompt[-block_size:]
    for _ in range(30):
        ids = torch.from_numpy(NO_NEWLINE.encode(text).astype(np.int64))[None]
        text += NO_NEWLINE.decode([int(logits_of_long_text(model, ids)[0, -1].argmax())])
    assert written(model, prompt, temperature=0, length=30) == [text[-30:]]


def test_a_streams_text_does_not_depend_on_how_many_are_drawn_together():
    model = noisy_model()
    together = written(model, num_samples=5)
    assert written(model, num_samples=2) == together[:2]
    assert written(model, streams=[3]) == [together[3]]
    assert written(model, streams=[4, 1]) == [together[4], together[1]]


@pytest.fixture
def threads(monkeypatch):
    """Have ten streams drawn by two compiled decoders, in threads; note which in which."""
    monkeypatch.setattr(decoder, "WORTH_COMPILING", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = []
    step = CompiledDecoder.step

    def noted(self, ids):
        found.append((self, threading.current_thread()))
        return step(self, ids)

    monkeypatch.setattr(CompiledDecoder, "step", noted)
    return found


@pytest.mark.parametrize("prompt", ["", "abc", "abcabcabcabcabcabc"])
@pytest.mark.parametrize(
    "options",
    [
        {"seed": 2**63 - 1},
        {"streams": [7, 2, 5, 4096, 1, 0, 3, 9, 11, 10]},
        {"temperature": 0},
        {"top_k": 3, "top_p": 0.7, "min_p": 0.1, "temperature": 3.0},
        {"tokenizer": CharTokenizer("abcdefghij", has_unknown=True)},
        {"stop": ("a", "bc", "\udcff")},
        {"length": 1},
    ],
)
def test_threads_write_the_same_texts(prompt, options, threads, monkeypatch):
    texts = written(noisy_model(), prompt, num_samples=10, **options)
    assert len(texts) == 10
    assert len({used for used, _ in threads}) == (0 if options.get("length") == 1 else 2)
    assert not any(thread.is_alive() for _, thread in threads)
    monkeypatch.setattr(decoder, "WORTH_COMPILING", math.inf)
    assert written(noisy_model(), prompt, num_samples=10, **options) == texts


def test_numbers_that_are_not_finite_are_told_by_any_thread(threads):
    model = noisy_model()
    with torch.no_grad():
        model.embedding.weight[10] = float("nan")  # of k
    with pytest.raises(WorkError, match=r"^the model's predictions are not finite numbers"):
        written(model, "a", num_samples=10, length=500)
    assert not any(thread.is_alive() for _, thread in threads)


def test_threads_end_after_the_step_that_they_are_at():
    taken = []

    def slow():
        for step in range(1000):
            taken.append(step)
            yield np.zeros(1, np.int64)
            time.sleep(0.01)

    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        next(side_by_side([slow(), slow()], steps=1000))
    assert 0 < len(taken) < 1000


def test_threads_draw_a_few_rounds_ahead_and_no_more(threads):
    options = SampleConfig(length=3000, num_samples=10, seed=1)
    pieces = stream(noisy_model(), NO_NEWLINE, NO_NEWLINE.encode("a"), options)
    next(pieces)
    pieces.close()
    assert 0 < len(threads) <= 2 * 2 * sampling.MOST_STEPS


def test_whoever_stops_listening_ends_the_threads(threads):
    options = SampleConfig(length=10**6, num_samples=10, seed=1)
    pieces = stream(noisy_model(), NO_NEWLINE, NO_NEWLINE.encode("a"), options)
    next(pieces)
    pieces.close()
    assert threads
    assert not any(thread.is_alive() for _, thread in threads)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_ends_by_a_signal_while_threads_draw(number, verse, tmp_path):
    sizes = ("n_layer=1", "n_embd=8", "n_head=1", "block_size=16")
    settings = [f"--set=model.{size}" for size in sizes]
    done = run_cli(
        "train", verse, "--out", "run", "-s", "train.max_steps=2", *settings, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    command = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "chargpt",
            "sample",
            "run",
            "--num-samples=16",
            "--length=100000000",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "2"},
    )
    try:
        assert command.stderr is not None
        assert command.stderr.readline().startswith("character ")
        command.send_signal(number)
        out, error = command.communicate(timeout=30)
    finally:
        command.kill()
    assert command.returncode in (-number, 128 + number), error
    assert not out
    assert "Traceback" not in error


def test_a_longer_text_begins_with_the_shorter_one():
    model = noisy_model()
    long = written(model, length=600)[0]  # past what is drawn at once
    assert written(model, length=100)[0] == long[:100]
    assert len(set(long[255:300])) > 3


def test_the_seed_decides_the_text():
    model = noisy_model()
    assert written(model, seed=1) == written(model, seed=1)
    assert written(model, seed=1) != written(model, seed=2)
    assert written(model, seed=None) != written(model, seed=None)


def test_only_the_last_block_of_a_long_prompt_counts():
    model = noisy_model(block_size=4)
    short = written(model, "abcd", num_samples=9)
    assert written(model, "kkkkkkabcd", num_samples=9) == short
    assert written(model, "bbcd", num_samples=9) != short


def test_an_empty_prompt_starts_after_a_newline_that_is_not_written():
    model = noisy_model(vocab_size=10)
    assert written(model, tokenizer=LETTERS) == written(model, "\n", tokenizer=LETTERS)
    assert written(model, tokenizer=LETTERS) != written(model, " ", tokenizer=LETTERS)


def first_characters(model, count=400, unigram=None, **options):
    chosen = SampleConfig(
        **{"length": 1, "num_samples": count, "seed": 3, "temperature": 1} | options
    )
    (pieces,) = stream(model, NO_NEWLINE, NO_NEWLINE.encode(""), chosen, unigram=unigram)
    return pieces


def test_without_a_newline_the_first_character_comes_from_the_unigram():
    model = noisy_model()
    counts = np.zeros(11, dtype=np.int64)
    counts[[2, 5]] = 300, 100
    pieces = first_characters(model, unigram=counts)
    assert set(pieces) == {"c", "f"}
    assert pieces.count("c") == pytest.approx(300, abs=35)
    assert set(first_characters(model, unigram=counts, temperature=0)) == {"c"}


def test_without_any_counts_the_first_character_is_any():
    pieces = first_characters(noisy_model(), count=1100)
    assert set(pieces) == set("abcdefghijk")
    assert max(map(pieces.count, set(pieces))) < 150


def test_what_follows_the_first_character_is_what_follows_it_as_a_prompt():
    model = noisy_model()
    text = written(model, temperature=0)[0]
    assert written(model, text[0], temperature=0, length=39)[0] == text[1:]


def test_temperature_zero_takes_the_likeliest_whatever_the_seed():
    model = noisy_model()
    assert written(model, "a", temperature=0, seed=1) == written(model, "a", temperature=0, seed=2)
    near = written(model, "a", temperature=1e-9, seed=3)
    assert near == written(model, "a", temperature=0)


def test_characters_come_as_often_as_the_model_expects_them():
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    model = BigramLM(4, block_size=8)
    model.table.weight.data = shares.log().repeat(4, 1)
    text = "".join(written(model, "a", CharTokenizer("abcd"), length=400, num_samples=50))
    for character, share in zip("abcd", shares.tolist(), strict=True):
        error = math.sqrt(share * (1 - share) / 20_000)
        assert text.count(character) / 20_000 == pytest.approx(share, abs=4 * error)


def filtered(shares, unknown_id=None, **options):
    logits = np.log([shares])
    chosen = SampleConfig(**{"temperature": 1.0} | options)
    kept = probabilities(logits, chosen, unknown_id)[0]
    return (kept / kept.sum()).tolist()


SHARES = [0.1, 0.4, 0.05, 0.3, 0.15]


def test_temperature_sharpens_and_flattens():
    assert filtered(SHARES) == pytest.approx(SHARES)
    squares = [share**2 for share in SHARES]
    assert filtered(SHARES, temperature=0.5) == pytest.approx(
        [square / sum(squares) for square in squares]
    )
    assert filtered(SHARES, temperature=0) == [0, 1, 0, 0, 0]
    assert filtered(SHARES, temperature=5e-324) == [0, 1, 0, 0, 0]
    assert filtered(SHARES, temperature=1e300) == pytest.approx([0.2] * 5)


def test_top_k_keeps_the_k_likeliest():
    assert filtered(SHARES, top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0])
    assert filtered(SHARES, top_k=1) == [0, 1, 0, 0, 0]
    assert filtered(SHARES, top_k=99) == pytest.approx(SHARES)
    assert filtered([0.25] * 4, top_k=3) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_top_p_keeps_the_fewest_likeliest_that_hold_the_share():
    assert filtered(SHARES, top_p=0.69) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0])
    assert filtered(SHARES, top_p=0.71) == pytest.approx([0, 8 / 17, 0, 6 / 17, 3 / 17])
    assert filtered(SHARES, top_p=1e-9) == [0, 1, 0, 0, 0]
    assert filtered([0.5, 0.5], top_p=0.5) == [1, 0]
    assert filtered(SHARES, top_p=1.0) == pytest.approx(SHARES)


def test_min_p_keeps_those_near_the_likeliest():
    assert filtered(SHARES, min_p=0.5) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0])
    assert filtered(SHARES, min_p=1.0) == [0, 1, 0, 0, 0]
    assert filtered(SHARES, min_p=0.0) == pytest.approx(SHARES)


def test_filters_apply_in_the_documented_order():
    # top-p counts shares of what top-k left: of 4/7 and 3/7, the first alone holds 0.55.
    assert filtered(SHARES, top_k=2, top_p=0.55) == [0, 1, 0, 0, 0]
    assert filtered(SHARES, top_p=0.55) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0])
    # temperature comes before top-p and min-p: flattened, more are needed.
    assert filtered([0.9, 0.1], top_p=0.6, temperature=9) == pytest.approx(
        filtered([0.9, 0.1], temperature=9)
    )
    assert filtered([0.9, 0.1], min_p=0.5, temperature=9)[1] > 0


def test_the_unknown_token_is_never_drawn():
    assert filtered(SHARES, unknown_id=1)[1] == 0
    assert filtered(SHARES, unknown_id=1, temperature=0) == [0, 0, 0, 1, 0]
    tokenizer = CharTokenizer("ab", has_unknown=True)
    model = BigramLM(3, block_size=4)
    model.table.weight.data[:, 2] = 5.0
    for prompt in ("", "a"):
        texts = written(model, prompt, tokenizer, num_samples=20)
        assert set("".join(texts)) == {"a", "b"}


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 1.0, 7.0]), min_size=1, max_size=9),
    uniform=st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53),
)
@example(weights=[0.0, 1.0], uniform=0.0)
@example(weights=[1.0, 0.0, 1.0], uniform=0.5)
@example(weights=[1.0, 0.0], uniform=1 - 2**-53)
def test_a_draw_is_the_inverse_of_the_cumulated_shares(weights, uniform):
    if not any(weights):
        return
    drawn = int(draw(np.array([weights]), np.array([uniform]))[0])
    assert weights[drawn] > 0
    total = math.fsum(weights)
    below, upto = math.fsum(weights[:drawn]), math.fsum(weights[: drawn + 1])
    assert below <= uniform * total * (1 + 1e-12)
    assert uniform * total <= upto * (1 + 1e-12)


def test_the_numbers_of_streams_are_uniform_and_unlike_each_other():
    rows = np.stack(list(itertools.islice(uniforms(1, range(4)), 5000)))
    assert rows.shape == (5000, 4)
    assert rows.min() >= 0
    assert rows.max() < 1
    assert rows.mean(axis=0) == pytest.approx([0.5] * 4, abs=0.02)
    assert abs(np.corrcoef(rows.T) - np.eye(4)).max() < 0.06
    assert abs(np.corrcoef(rows[1:, 0], rows[:-1, 0])[0, 1]) < 0.06


def test_a_seed_means_the_same_numbers_in_every_version():
    first, second = itertools.islice(uniforms(1337, [0, 1]), 2)
    assert first.tolist() == pytest.approx([0.32430768661483333, 0.2558335419272051], abs=1e-15)
    assert second.tolist() == pytest.approx([0.9429179866882604, 0.18302434176703442], abs=1e-15)


@pytest.mark.parametrize("stop", ["c", "bc", "abc", "cab"])
def test_text_ends_before_the_first_stop_string(stop):
    cycle = BigramLM(3, block_size=4)  # a -> b -> c -> a
    cycle.table.weight.data = torch.eye(3).roll(1, dims=1) * 50
    whole = "bcabcabca"
    text = written(cycle, "a", CharTokenizer("abc"), length=9, stop=(stop,), temperature=0)[0]
    assert text == whole[: whole.index(stop)]


def test_a_text_that_ends_within_a_stop_string_is_whole():
    cycle = BigramLM(3, block_size=4)
    cycle.table.weight.data = torch.eye(3).roll(1, dims=1) * 50
    text = written(cycle, "a", CharTokenizer("abc"), length=7, stop=("bcb",), temperature=0)[0]
    assert text == "bcabcab"


def test_the_stop_string_that_begins_first_counts():
    tail = sampling._Tail(("bcd", "cd"))
    assert [tail.push(letter, False) for letter in "abcd"] == ["a", "", "", ""]
    assert tail.ended


def test_what_only_looked_like_a_stop_string_is_written_after_all():
    tail = sampling._Tail(("aab", "xyz"))
    pieces = [tail.push(letter, False) for letter in "xyaaaab"]
    assert pieces == ["", "", "xy", "", "a", "a", ""]
    assert tail.ended
    unfinished = sampling._Tail(("aab",))
    assert unfinished.push("a", False) + unfinished.push("a", True) == "aa"
    assert unfinished.ended


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4)))
@settings(max_examples=200)
def test_held_back_pieces_make_up_the_text_before_the_stop(text, stops):
    tail = sampling._Tail(tuple(stops))
    out = "".join(tail.push(letter, i == len(text) - 1) for i, letter in enumerate(text))
    for end in range(len(text) + 1):
        places = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if places:
            assert out == text[: min(places)]
            return
    assert out == text


def test_a_stream_that_has_ended_is_silent_and_all_ended_end_the_work():
    model = noisy_model()
    plain = written(model, num_samples=3, length=200)
    stop = "a"
    steps = list(
        stream(
            model,
            NO_NEWLINE,
            NO_NEWLINE.encode(""),
            SampleConfig(length=200, seed=5, temperature=1, num_samples=3, stop=(stop,)),
        )
    )
    texts = ["".join(pieces) for pieces in zip(*steps, strict=True)]
    assert texts == [text[: text.index(stop)] for text in plain]
    assert len(steps) == max(map(len, texts)) + 1 < 200
    assert len(set(map(len, texts))) > 1


def test_a_prompt_that_holds_a_stop_string_does_not_stop():
    model = noisy_model()
    text = written(model, "kkk", stop=("kk",), temperature=0)[0]
    assert text
    assert "kk" not in text


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="stop string is empty"):
        written(noisy_model(), stop=("",))


def test_a_model_gone_astray_is_said_in_a_sentence():
    for value in (math.nan, math.inf):
        model = BigramLM(11, block_size=4)
        model.table.weight.data[3] = value
        with pytest.raises(WorkError, match="not finite"):
            written(model, "d")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("attention", ["full", "average"])
def test_writing_is_without_dropout_and_leaves_the_mode_as_it_was(training, attention):
    model = noisy_model(dropout=0.5, attention=attention).train(training)
    assert written(model, "a") == written(noisy_model(attention=attention), "a")
    assert model.training is training
    options = SampleConfig(length=9)
    pieces = stream(model, NO_NEWLINE, NO_NEWLINE.encode("a"), options)
    next(pieces)
    assert torch.is_inference_mode_enabled() is False
    pieces.close()
    assert model.training is training


@pytest.fixture
def make_run(tmp_path):
    def make(text="no newline here", **values):
        path = tmp_path / "sea.txt"
        path.write_text(text, newline="")
        sizes = {"sample.length": 20, "sample.seed": 5, "text.path": str(path)}
        config = Config().with_values(sizes | values)
        corpus = load_corpus(config.text)
        model = noisy_model(vocab_size=corpus.tokenizer.vocab_size)
        return Run(tmp_path, config, corpus.tokenizer, model, 5, RunState(5, corpus=corpus.key))

    return make


def test_a_sample_is_the_prompt_and_what_follows(make_run):
    run = make_run()
    options = run.config.sample.model_copy(update={"prompt": "here", "num_samples": 2})
    texts = sample(run, options)
    followed = zip(*stream_run(run, options), strict=True)
    assert texts == ["here" + "".join(pieces) for pieces in followed]
    assert [len(text) for text in texts] == [24, 24]
    assert sample(run, prompt="here", num_samples=2) == texts
    assert sample(run, options, num_samples=1) == texts[:1]


def test_many_samples_are_drawn_in_groups_to_the_same_texts(make_run, monkeypatch):
    run = make_run()
    together = sample(run, num_samples=7)
    widths = []
    step = NumpyDecoder.step
    monkeypatch.setattr(
        NumpyDecoder, "step", lambda self, ids: (widths.append(len(ids)), step(self, ids))[1]
    )
    monkeypatch.setattr(sampling, "GROUP_BYTES", 3 * (2 * 2 * 2 * 64 * 64 * 4 + 4 * 9) + 5)
    assert run.model.vocab_size == 9
    told = []
    assert sample(run, num_samples=7, watch=lambda *counts: told.append(counts)) == together
    assert max(widths) == 3
    assert told == [(3 * n, 140) for n in range(1, 41)] + [(120 + n, 140) for n in range(1, 21)]
    assert len(set(sample(run, num_samples=7, seed=None))) == 7


def test_a_job_that_is_cut_in_groups_is_compiled_as_a_whole_or_not_at_all(
    make_run, monkeypatch, threads
):
    run = make_run()
    monkeypatch.setattr(sampling, "_group_size", lambda model: 3)
    work = run.model.parameter_count() * 20 * (7 + 3)  # is_worth_compiling
    monkeypatch.setattr(decoder, "WORTH_COMPILING", work + 1)
    by_numpy = sample(run, num_samples=7)
    assert not threads
    monkeypatch.setattr(decoder, "WORTH_COMPILING", work)
    monkeypatch.delattr(NumpyDecoder, "step")
    assert sample(run, num_samples=7) == by_numpy
    assert threads


def test_the_command_tells_how_far_it_is(make_run, monkeypatch, capsys):
    run = make_run()
    monkeypatch.setattr(console, "PLAIN_LINE_SECONDS", 0)
    options = run.config.sample.model_copy(update={"num_samples": 2})
    assert write_texts(run, options, None) == sample(run, options)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("character 2/40  written")
    assert told[-1].startswith("character 40/40  written")


def test_a_run_without_newlines_starts_from_its_texts_unigram(make_run, tmp_path):
    run = make_run("ab" + "c" * 400 + "ab")
    firsts = [text[0] for text in sample(run, length=1, num_samples=50, temperature=1)]
    assert firsts.count("c") >= 45
    (tmp_path / "sea.txt").unlink()
    assert [text[0] for text in sample(run, length=1, num_samples=50, temperature=1)] == firsts


def test_a_run_whose_text_is_out_of_reach_starts_anywhere(make_run, tmp_path, monkeypatch):
    run = make_run("ab" + "c" * 400 + "ab")
    monkeypatch.setenv("CHARGPT_CACHE", str(tmp_path / "elsewhere"))
    (tmp_path / "sea.txt").unlink()
    firsts = [text[0] for text in sample(run, length=1, num_samples=50, temperature=1)]
    assert set(firsts) == {"a", "b", "c"}
    piped = Run(
        run.folder,
        run.config.with_values({"text.path": "-"}),
        run.tokenizer,
        run.model,
        run.step,
        run.state,
    )
    assert sample(piped, length=1, num_samples=50, temperature=1) == firsts


def test_unknown_characters_of_the_prompt_follow_the_policy(make_run):
    run = make_run()
    with pytest.raises(UnknownCharacterError, match=r"U\+00C9"):
        sample(run, prompt="hÉre")
    assert sample(run, prompt="hÉre", unknown="skip")[0][4:] == sample(run, prompt="hre")[0][3:]
    assert sample(run, prompt="É", unknown="skip") == ["É" + sample(run)[0]]
    lenient = make_run(**{"text.unknown": "replace"})
    assert sample(lenient, prompt="hÉre")[0][4:] == sample(lenient, prompt="h re")[0][4:]


def test_wrong_settings_are_refused_before_anything_is_drawn(make_run):
    run = make_run()
    with pytest.raises(ConfigError, match=r"sample\.temprature.*did you mean sample\.temperature"):
        sample(run, temprature=1)
    with pytest.raises(ConfigError, match=r"sample\.length"):
        sample(run, length=0)
    with pytest.raises(UnknownCharacterError):
        stream_run(run, SampleConfig(prompt="É"))
