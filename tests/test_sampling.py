"""Sampling: reproducible texts, filters, stop strings, prompts."""

import functools
import itertools
import json
import math
import pickle
import re
import shutil
import signal
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import POSIX, REPOSITORY, start_cli
from formula import logits_of_long_text
from hypothesis import example, given, settings
from hypothesis import strategies as st
from noise import noisy_model, noisy_run_on
from threadpoolctl import threadpool_info, threadpool_limits

from chargpt.cli import sample as cli_sample
from chargpt.cli.interact import print_stream
from chargpt.config import SampleConfig
from chargpt.errors import ConfigError, OperationError, UnknownCharacterError
from chargpt.inference import generation, sampling
from chargpt.inference.decoders import ModelDecoder, NumpyDecoder
from chargpt.inference.evaluation import evaluate
from chargpt.inference.generation import sample, stream, stream_pieces, stream_run
from chargpt.models.ngram import BigramLM
from chargpt.text.tokenizer import CharTokenizer

LETTERS = CharTokenizer("\n abcdefgh")
NO_NEWLINE = CharTokenizer("abcdefghijk")


def continuations(model, prompt="", tokenizer=NO_NEWLINE, sequence_ids=None, **options):
    """Return the whole text of each stream, without the prompt."""
    settings = SampleConfig(**{"length": 40, "seed": 5, "temperature": 1.0} | options)
    steps = stream_pieces(
        model, tokenizer, tokenizer.encode(prompt), settings, sequence_ids=sequence_ids
    )
    return join(steps)


def join(steps):
    """Return the texts of the pieces of all steps."""
    return ["".join(piece.text for piece in pieces) for pieces in zip(*steps, strict=True)]


@pytest.mark.parametrize("block_size", [1, 2, 3, 12])
@pytest.mark.parametrize("prompt", ["a", "abcabcabcabcabcabc"])
@pytest.mark.parametrize("rung", [{}, {"attention": "average"}, {"attention": "none"}])
def test_greedy_text_is_the_most_likely_one_by_the_formula(block_size, prompt, rung):
    model = noisy_model(block_size=block_size, **rung)
    text = prompt[-block_size:]
    for _ in range(30):
        ids = torch.from_numpy(NO_NEWLINE.encode(text).astype(np.int64))[None]
        text += NO_NEWLINE.decode([int(logits_of_long_text(model, ids)[0, -1].argmax())])
    assert continuations(model, prompt, temperature=0, length=30) == [text[-30:]]


def test_a_streams_text_does_not_depend_on_the_number_of_streams():
    model = noisy_model()
    together = continuations(model, num_samples=5)
    assert continuations(model, num_samples=2) == together[:2]
    assert continuations(model, sequence_ids=[3]) == [together[3]]
    assert continuations(model, sequence_ids=[4, 1]) == [together[4], together[1]]


@POSIX
@pytest.mark.parametrize(
    ("number", "form"),
    [
        *((signal.SIGINT, ["--num-samples=1"]), (signal.SIGTERM, ["--num-samples=1"])),
        *((signal.SIGINT, ["--num-samples=16"]), (signal.SIGTERM, ["--json"])),
    ],
)
def test_a_signal_ends_the_sample_command_and_what_was_sampled_is_printed(number, form, tmp_path):
    run = REPOSITORY / "tests" / "golden" / "0.1.0" / "run"
    threads = "export OMP_NUM_THREADS=2;"
    command = start_cli("sample", run, *form, "-n100000000", cwd=tmp_path, shell=threads)
    is_streamed = form == ["--num-samples=1"]
    try:
        if is_streamed:
            assert command.stdout.read(1)  # it is streamed
        else:
            assert command.stderr.readline().startswith("character ")
        command.send_signal(number)
        out, error = command.communicate(timeout=30)
    finally:
        command.kill()
    assert command.returncode in (-number, 128 + number), error
    assert number != signal.SIGINT or error.endswith("stopped\n")
    assert out.endswith("\n") or (is_streamed and number == signal.SIGTERM)
    assert "Traceback" not in error
    if form == ["--json"]:
        result = json.loads(out)
        assert (result["ended"], result["finished"]) == (["stopped"], [False])
        assert len(result["continuations"][0]) > 10
    elif not is_streamed:
        texts = re.split("-- sample [0-9]+ --\n", out)[1:]
        assert len({len(text) for text in texts}) == 1 < len(texts[0])
        assert "these are the samples so far: 16 of 16, of which 16 are unfinished" in error


@pytest.mark.parametrize("while_", ["sample_groups", "measure_overlap"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_signal_before_the_overlap_is_measured_prints_the_samples(
    form, while_, trained, cli, monkeypatch
):
    work = getattr(cli_sample, while_)

    def interrupted(*args, **others):
        signal.raise_signal(signal.SIGINT)
        return work(*args, **(others | {"is_stopped": lambda: False}))

    monkeypatch.setattr(cli_sample, while_, interrupted)
    done = cli("sample", trained, "--overlap", "--num-samples", "2", "-n", "30", *form)
    assert done.returncode == 130
    texts = json.loads(done.stdout)["samples"] if form else done.stdout.split("-- sample 2 --")
    assert len(texts) == 2
    assert min(map(len, texts)) >= 30
    assert "the overlap with the training split was not measured" in done.stderr


@pytest.mark.parametrize("n_calls", [1, 7, 25, 31])  # of the test whether it is stopped
def test_a_stopped_sampling_returns_the_texts_so_far(n_calls, make_run, monkeypatch):
    run = make_run(TEXT)
    texts = sample(run, num_samples=5)  # of 20 characters
    monkeypatch.setattr(generation, "MAX_GROUP_BYTES", 0)  # one text at a time
    calls = itertools.count(1)
    stopped = sample(run, num_samples=5, is_stopped=lambda: next(calls) >= n_calls)
    n_whole, n_rest = divmod(n_calls, 21)  # one call more after each text
    assert stopped == [*texts[:n_whole], texts[n_whole][:n_rest]]
    ended = [(text.ended, text.finished) for text in stopped]
    assert ended == [*[("length", False)] * n_whole, ("stopped", False)]


def test_a_longer_text_begins_with_the_shorter_one():
    model = noisy_model()
    long = continuations(model, length=600)[0]  # more than one chunk of uniform numbers
    assert continuations(model, length=100)[0] == long[:100]
    assert len(set(long[255:300])) > 3


def test_the_seed_decides_the_text_but_at_temperature_zero():
    model = noisy_model()
    assert continuations(model, seed=1) == continuations(model, seed=1)
    assert continuations(model, seed=1) != continuations(model, seed=2)
    assert continuations(model, seed=None) != continuations(model, seed=None)
    one, other = (continuations(model, "a", temperature=0, seed=seed) for seed in (1, 2))
    assert one == other == continuations(model, "a", temperature=1e-9, seed=3)


def test_an_empty_prompt_starts_after_a_newline_that_is_not_returned():
    model = noisy_model(vocab_size=10)
    assert continuations(model, tokenizer=LETTERS) == continuations(model, "\n", tokenizer=LETTERS)
    assert continuations(model, tokenizer=LETTERS) != continuations(model, " ", tokenizer=LETTERS)


def test_without_a_newline_the_first_character_is_sampled_from_the_unigram():
    model, counts = noisy_model(), np.zeros(11, dtype=np.int64)
    counts[[2, 5]] = 300, 100

    def firsts(counts, **options):
        chosen = SampleConfig(**{"length": 1, "num_samples": 1000, "seed": 3, **options})
        unigram = None if counts is None else lambda: counts
        step = next(stream_pieces(model, NO_NEWLINE, [], chosen, unigram=unigram))
        return [piece.text for piece in step]

    pieces = firsts(counts, temperature=1)
    assert set(pieces) == {"c", "f"}
    assert pieces.count("c") == pytest.approx(750, abs=60)
    assert set(firsts(counts, temperature=0)) == {"c"}
    uniform = firsts(None, temperature=1)  # without counts
    assert set(uniform) == set("abcdefghijk")
    assert max(map(uniform.count, set(uniform))) < 150
    text = continuations(model, temperature=0)[0]  # it is continued like a prompt
    assert continuations(model, text[0], temperature=0, length=39)[0] == text[1:]


PROBS = [0.1, 0.4, 0.05, 0.3, 0.15]


def filtered(probs=PROBS, allowed=None, **options):
    chosen = SampleConfig(**{"temperature": 1.0} | options)
    allowed = None if allowed is None else allowed[None]
    remaining = sampling.filter_probs(np.log([probs]), chosen, allowed)[0]
    return (remaining / remaining.sum()).tolist()


BEST, BEST_TWO = [0, 1, 0, 0, 0], [0, 4 / 7, 0, 3 / 7, 0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, [p**2 / 0.285 for p in PROBS]),
        ({"temperature": 0}, BEST),
        ({"temperature": 5e-324}, BEST),
        ({"temperature": 1e300}, [0.2] * 5),
        ({"top_k": 2}, BEST_TWO),
        ({"top_k": 1}, BEST),
        ({"top_k": 99}, PROBS),
        ({"top_k": 3, "probs": [0.25] * 4}, [1 / 3, 1 / 3, 1 / 3, 0]),
        ({"top_p": 0.69}, BEST_TWO),
        ({"top_p": 0.71}, [0, 8 / 17, 0, 6 / 17, 3 / 17]),
        ({"top_p": 1e-9}, BEST),
        ({"top_p": 0.5, "probs": [0.5, 0.5]}, [1, 0]),
        ({"top_p": 1.0}, PROBS),
        ({"min_p": 0.5}, BEST_TWO),
        ({"min_p": 1.0}, BEST),
        ({"min_p": 0.0}, PROBS),
        # top-p uses the probabilities that top-k left: of 4/7 and 3/7, the first exceeds 0.55
        ({"top_k": 2, "top_p": 0.55}, BEST),
        ({"top_p": 0.55}, BEST_TWO),
        # temperature comes first: 0.9 and 0.1 become 0.75 and 0.25, so that both remain
        ({"top_p": 0.8, "temperature": 2, "probs": [0.9, 0.1]}, [0.75, 0.25]),
        ({"min_p": 0.3, "temperature": 2, "probs": [0.9, 0.1]}, [0.75, 0.25]),
    ],
)
def test_filters_apply_in_the_documented_order(options, expected):
    assert filtered(**options) == pytest.approx(expected)


def test_the_unknown_token_is_never_sampled():
    allowed = np.array([True, False, True, True, True])
    assert filtered(allowed=allowed)[1] == 0
    assert filtered(allowed=allowed, temperature=0) == [0, 0, 0, 1, 0]
    model = BigramLM(3, block_size=4)
    model.table.weight.data[:, 2] = 5.0
    for prompt in ("", "a"):
        tokenizer = CharTokenizer("ab", has_unknown=True)
        texts = continuations(model, prompt, tokenizer, num_samples=20)
        assert set("".join(texts)) == {"a", "b"}


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 1.0, 7.0]), min_size=1, max_size=9),
    uniform=st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53),
)
@example(weights=[0.0, 1.0], uniform=0.0)
@example(weights=[1.0, 0.0, 1.0], uniform=0.5)
@example(weights=[1.0, 0.0], uniform=1 - 2**-53)
def test_sampling_inverts_the_cumulative_distribution(weights, uniform):
    if not any(weights):
        return
    token = int(sampling.sample_tokens(np.array([weights]), np.array([uniform]))[0])
    assert weights[token] > 0
    total = math.fsum(weights)
    below, upto = math.fsum(weights[:token]), math.fsum(weights[: token + 1])
    assert below <= uniform * total * (1 + 1e-12)
    assert uniform * total <= upto * (1 + 1e-12)


def test_the_random_numbers_are_uniform_and_independent_between_streams():
    rows = np.stack(list(itertools.islice(sampling.uniforms(1, range(4)), 5000)))
    assert rows.shape == (5000, 4)
    assert rows.min() >= 0
    assert rows.max() < 1
    assert rows.mean(axis=0) == pytest.approx([0.5] * 4, abs=0.02)
    assert abs(np.corrcoef(rows.T) - np.eye(4)).max() < 0.06
    assert abs(np.corrcoef(rows[1:, 0], rows[:-1, 0])[0, 1]) < 0.06


def test_a_seed_gives_the_same_random_numbers_in_every_version():
    first, second = itertools.islice(sampling.uniforms(1337, [0, 1]), 2)
    assert first.tolist() == pytest.approx([0.32430768661483333, 0.2558335419272051], abs=1e-15)
    assert second.tolist() == pytest.approx([0.9429179866882604, 0.18302434176703442], abs=1e-15)


def pieces_of(text, eos_token="", **options):
    """Return the pieces of a stream that samples a text, and how it has ended."""
    tokenizer = CharTokenizer("".join(sorted({*text, *eos_token})), eos_token=eos_token)
    stream = sampling.SampledText(tokenizer, SampleConfig(**options))
    return [stream.push(int(token)) for token in tokenizer.encode(text)], stream.ended


def test_the_beginning_of_a_stop_string_is_returned_if_the_rest_does_not_follow():
    pieces = ["", "", "xy", "", "a", "a", ""]
    assert pieces_of("xyaaaab", stop=("aab", "xyz")) == (pieces, "stop")
    assert pieces_of("aa", stop=("aab",), length=2) == (["", "aa"], "length")
    assert pieces_of("abcd", stop=("bcd", "cd")) == (["a", "", "", ""], "stop")


@given(
    text=st.text("ab", min_size=1, max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4)),
)
@settings(max_examples=200)
def test_the_pieces_join_to_the_text_before_the_stop_string(text, stops):
    out = "".join(pieces_of(text, stop=tuple(stops), length=len(text))[0])
    for end in range(len(text) + 1):
        places = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if places:
            assert out == text[: min(places)]
            return
    assert out == text


@pytest.mark.parametrize(
    ("text", "options", "written", "ended"),
    [
        ("anna", {}, "anna", ""),
        ("anna\n", {}, "anna", "document"),
        ("anna\n", {"length": 5}, "anna", "document"),
        ("anna\n", {"length": 4}, "anna", "document"),  # its end is the next token
        ("annab", {"length": 4}, "anna", "length"),
        ("anna\n", {"length": 3}, "ann", "length"),
        ("anna", {"length": 4, "stop": ("na",)}, "an", "stop"),
        ("anna\n", {"length": 4, "stop": ("a\n",)}, "anna", "document"),
        ("anna\n", {"stop": ("a\n", "\n")}, "ann", "stop"),
        ("anna\n", {"stop": ("\n",)}, "anna", "document"),
    ],
)
def test_a_text_records_why_it_ended(text, options, written, ended):
    pieces, found = pieces_of(text, eos_token="\n", **options)
    assert ("".join(pieces), found) == (written, ended)


def test_a_stopped_stream_yields_empty_pieces_until_all_have_stopped():
    model = noisy_model()
    plain = continuations(model, num_samples=3, length=200)
    options = SampleConfig(length=200, seed=5, temperature=1, num_samples=3, stop=("a",))
    steps = list(stream_pieces(model, NO_NEWLINE, NO_NEWLINE.encode(""), options))
    texts = join(steps)
    assert texts == [text[: text.index("a")] for text in plain]
    assert len(steps) == max(map(len, texts)) + 1 < 200
    assert len(set(map(len, texts))) > 1


def test_a_stop_string_in_the_prompt_does_not_stop():
    text = continuations(noisy_model(), "kkk", stop=("kk",), temperature=0)[0]
    assert text
    assert "kk" not in text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_logits_are_reported(value):
    model = BigramLM(11, block_size=4)
    model.table.weight.data[3] = value
    with pytest.raises(OperationError, match="not finite"):
        continuations(model, "d")


TEXT = "no newline here"


@pytest.fixture
def make_run(tmp_path):
    return functools.partial(noisy_run_on, tmp_path, **{"sample.length": 20, "sample.seed": 5})


def test_a_sample_is_the_prompt_and_its_continuation(make_run):
    run = make_run(TEXT)
    options = run.config.sample.model_copy(update={"prompt": "here", "num_samples": 2})
    texts = sample(run, options)
    assert texts == ["here" + text for text in join(stream_run(run, options))]
    assert [len(text) for text in texts] == [24, 24]
    assert (type(texts[0].text), texts[0].text) == (str, texts[0])
    assert sample(run, prompt="here", num_samples=2) == texts
    assert sample(run, options, num_samples=1) == texts[:1]
    restored = pickle.loads(pickle.dumps(texts[0]))
    assert ("here" + restored.continuation, restored.ended) == (texts[0], "length")
    stopped = sample(run, options, stop=(texts[0][8],))[0]
    assert (stopped, stopped.ended) == (texts[0][: 4 + len(stopped.continuation)], "stop")


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.3, "top_k": 3}])
def test_the_surprisal_of_a_sample_is_what_the_model_assigns_to_what_was_sampled(filters, make_run):
    run = make_run(TEXT)
    texts = sample(run, prompt="here", num_samples=3, length=8, **filters)
    stop = texts[0][9:11]
    end = texts[0].index(stop, 4)
    stopped = sample(run, prompt="here", length=8, stop=[stop], **filters)[0]
    assert (stopped.text, stopped.finished) == (texts[0][:end], True)
    for text, sampled in ((stopped, texts[0][: end + 2]), *((each, each.text) for each in texts)):
        tokens = torch.from_numpy(run.tokenizer.encode(sampled).astype(np.int64))
        log_probs = run.logits(sampled).log_softmax(dim=1)[3:-1]
        bits = -log_probs.gather(1, tokens[4:, None]).mean() / math.log(2)
        assert text.surprisal == pytest.approx(float(bits), rel=1e-4)
    assert texts[0].finished is False
    half = sample(run, length=9, is_stopped=lambda: True)[0]
    assert half.surprisal == pytest.approx(sample(run, length=1)[0].surprisal)


def test_the_surprisal_does_not_depend_on_how_many_steps_are_decoded_ahead(make_run, monkeypatch):
    run = make_run(TEXT)
    found = [each.surprisal for each in sample(run, length=60, num_samples=3, seed=1)]
    monkeypatch.setattr(sampling, "SLICE_SECONDS", 0)  # one by one
    assert [each.surprisal for each in sample(run, length=60, num_samples=3, seed=1)] == found


def test_the_memory_of_a_sampled_character_is_that_of_its_text(make_run, capsys):
    run = make_run(TEXT)
    peaks = []
    for length in (500, 4500):
        tracemalloc.start()
        assert len(sample(run, length=length)[0]) == length
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 4000 * 20  # bytes
    values = {"sample.length": 450, "sample.prompt": "here", "sample.seed": 5}
    kept = print_stream(run, run.config.with_values(values), n_kept=100)
    written = capsys.readouterr().out
    assert len(written) == len("here") + 450 + 1
    assert (written[-1 - len(kept) : -1], kept.ended) == (kept, "length")
    assert 100 <= len(kept) <= 200


@pytest.mark.parametrize("training", [True, False])
def test_sampling_is_without_dropout_and_restores_mode_and_blas_between_steps(
    training, monkeypatch
):
    def blas_threads():
        return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}

    def step(decoder, tokens):
        assert (blas_threads(), decoder.model.training) == ({1}, False)
        return real(decoder, tokens)

    real = ModelDecoder.step
    monkeypatch.setattr(ModelDecoder, "step", step)
    monkeypatch.setattr(sampling, "SLICE_SECONDS", 0)
    model = noisy_model(dropout=0.5, attention="average").train(training)
    expected = continuations(noisy_model(attention="average"), "a")
    options = SampleConfig(length=40, seed=5, temperature=1)
    with threadpool_limits(2, user_api="blas"):
        streams = [
            stream_pieces(model, NO_NEWLINE, NO_NEWLINE.encode("a"), options) for _ in range(2)
        ]
        steps = [[next(pieces)] for pieces in streams]
        for first, pieces in zip(steps, streams, strict=True):
            assert (blas_threads(), model.training) == ({2}, training)
            assert torch.is_inference_mode_enabled() is False
            assert join([*first, *pieces]) == expected
        assert (blas_threads(), model.training) == ({2}, training)


def test_threads_decode_one_at_a_time_and_get_the_same_texts_beside_an_evaluation(
    make_run, monkeypatch
):
    run, decoding, real = make_run(TEXT), threading.Lock(), NumpyDecoder.step
    alone = [sample(run, seed=seed, num_samples=2) for seed in range(8)]
    loss = evaluate(run, "train").nats_per_char

    def step(decoder, tokens):
        assert decoding.acquire(blocking=False), "two threads decode at once"
        time.sleep(0.001)  # lets another thread run
        logits = real(decoder, tokens)
        decoding.release()
        return logits

    monkeypatch.setattr(NumpyDecoder, "step", step)
    slow = stream(run)
    next(slow)  # what is read of it later blocks no other thread
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda seed: sample(run, seed=seed, num_samples=2), range(8))
        losses = [evaluate(run, "train").nats_per_char for _ in range(20)]
        assert list(texts) == alone
    assert set(losses) == {loss}
    assert len("".join(slow)) == 19


def test_sampling_in_groups_gives_the_same_texts_and_reports_its_progress(make_run, monkeypatch):
    run = make_run(TEXT)
    together = sample(run, num_samples=7)
    step = Mock(side_effect=NumpyDecoder.step, autospec=True)
    monkeypatch.setattr(NumpyDecoder, "step", lambda *args: step(*args))
    monkeypatch.setattr(generation, "MAX_GROUP_BYTES", 3 * (8 * 2 * 16 * 12 + 48 * 9) + 5)
    assert run.model.vocab_size == 9
    calls = []
    assert sample(run, num_samples=7, on_progress=lambda *c: calls.append(c)) == together
    assert max(len(call.args[1]) for call in step.mock_calls) == 3
    assert calls == [(3 * n, 140) for n in range(1, 41)] + [(120 + n, 140) for n in range(1, 21)]
    assert len(set(sample(run, num_samples=7, seed=None))) == 7


def test_a_run_without_newlines_starts_from_its_texts_unigram_if_it_has_its_text(
    make_run, tmp_path
):
    run, options = make_run("ab" + "c" * 400 + "ab"), {"length": 1, "num_samples": 50}
    assert [text[0] for text in sample(run, **options, temperature=1)].count("c") >= 45
    shutil.rmtree(tmp_path / "text")
    assert {text[0] for text in sample(run, **options, temperature=1)} == {"a", "b", "c"}


def test_unknown_characters_of_the_prompt_follow_the_policy(make_run):
    run = make_run(TEXT)
    with pytest.raises(UnknownCharacterError, match=r"U\+00C9"):
        sample(run, prompt="hÉre")
    assert sample(run, prompt="hÉre", unknown="skip")[0][4:] == sample(run, prompt="hre")[0][3:]
    assert sample(run, prompt="É", unknown="skip") == ["É" + sample(run)[0]]
    lenient = make_run(TEXT, **{"text.unknown": "replace"})
    assert sample(lenient, prompt="hÉre")[0][4:] == sample(lenient, prompt="h re")[0][4:]


def test_invalid_settings_are_rejected_before_sampling(make_run):
    run = make_run(TEXT)
    with pytest.raises(UnknownCharacterError):
        stream_run(run, SampleConfig(prompt="É"))
    with pytest.raises(ConfigError, match="stop string is empty"):
        sample(run, stop="")
