"""Mixed runs: several runs as one, by the weighted average of their probabilities."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, Cli, run_here
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import noisy_run, noisy_run_on, random_tokens
from shared_runs import MIXED_SETTINGS, QUICK

import chargpt
from chargpt.analysis.memorization import measure_overlap
from chargpt.errors import ChargptError, ConfigError, RunError
from chargpt.inference.decoders import EnsembleDecoder, ModelDecoder, build_decoder
from chargpt.inference.evaluation import evaluate
from chargpt.inference.generation import sample, stream
from chargpt.inference.scoring import score
from chargpt.store.ensemble import mix
from chargpt.store.mixture import with_mixture
from chargpt.store.run import Run
from chargpt.text.corpus import SPLITS
from chargpt.text.tokenizer import CharTokenizer

MIXED_WORDS = [word for key, value in MIXED_SETTINGS.items() for word in ("-s", f"{key}={value}")]
LATIN = CharTokenizer("\n ABCab")
GREEK = CharTokenizer("\n Cαβγ")
WITH_BYTES = CharTokenizer("\n abγ", has_bytes=True)
WITH_UNKNOWN = CharTokenizer("\n ab", has_unknown=True)
TOKENIZERS = (LATIN, GREEK, WITH_BYTES, WITH_UNKNOWN)


def noisy_runs(*tokenizers: CharTokenizer, block_sizes: tuple[int, ...] = (12, 7, 5)) -> list[Run]:
    pairs = zip(tokenizers, block_sizes, strict=False)
    return [noisy_run(each, seed, block_size=size) for seed, (each, size) in enumerate(pairs)]


def probs_after(run: Run, text: str) -> dict[str, float]:
    """Return the probability of each next character after a text of up to a block."""
    probs = run.logits(text)[-1].double().softmax(dim=-1).tolist()
    return {run.tokenizer.token_text(token): prob for token, prob in enumerate(probs)}


def test_probabilities_are_the_weighted_average_over_the_union_of_the_characters() -> None:
    latin, greek = noisy_runs(LATIN, GREEK)
    mixed = mix([latin, greek], weights=[0.7, 0.3])
    assert mixed.tokenizer.characters == "\n ABCabαβγ"
    # in the context of each run stands its first printable character, the space, for others
    own = probs_after(latin, "\nCa "), probs_after(greek, "\nC α")
    found = probs_after(mixed, "\nCaα")
    assert found.keys() == own[0].keys() | own[1].keys()
    for character, prob in found.items():
        expected = 0.7 * own[0].get(character, 0) + 0.3 * own[1].get(character, 0)
        assert prob == pytest.approx(expected, rel=1e-4), character


def test_more_than_two_runs_are_mixed_with_equal_weights_by_default() -> None:
    parts = noisy_runs(LATIN, LATIN, GREEK)
    found = probs_after(mix(parts), "\n C")
    owns = [probs_after(each, "\n C") for each in parts]
    for character, prob in found.items():
        expected = sum(own.get(character, 0) for own in owns) / 3
        assert prob == pytest.approx(expected, rel=1e-4), character


@given(
    tokenizers=st.lists(st.sampled_from(TOKENIZERS), min_size=2, max_size=3),
    weight=st.floats(0.01, 0.99),
)
@settings(max_examples=20, deadline=None)
def test_the_probabilities_of_any_mix_sum_to_one(
    tokenizers: list[CharTokenizer], weight: float
) -> None:
    weights = [weight, *[(1 - weight) / (len(tokenizers) - 1)] * (len(tokenizers) - 1)]
    mixed = mix(noisy_runs(*tokenizers), weights)
    tokens = random_tokens(steps=12, vocab_size=mixed.tokenizer.vocab_size)
    with torch.inference_mode():
        logits = mixed.model(tokens)
    assert torch.logsumexp(logits, dim=-1).abs().max() < 1e-5


def test_tokens_of_other_vocabularies_are_the_same_if_they_spell_the_same() -> None:
    union = CharTokenizer.union([LATIN, WITH_BYTES])
    assert union.has_bytes
    ids, is_known = WITH_BYTES.ids_of_tokens(union)
    for token in range(union.vocab_size):
        form = union.token_text(token)
        if form in ("A", "B", "C"):  # a character there, a byte token here
            form = f"<0x{ord(form):02X}>"
        assert is_known[token]
        assert WITH_BYTES.token_text(int(ids[token])) == form
    ids, is_known = LATIN.ids_of_tokens(union)
    assert [union.token_text(token) for token in np.flatnonzero(is_known)] == [*"\n ABCabγ"[:-1]]
    assert {*ids[~is_known].tolist()} == {LATIN.replacement_id}
    with_sign = CharTokenizer("\n \ufffd")  # the character by which the unknown token is shown
    both = CharTokenizer.union([with_sign, WITH_UNKNOWN])
    assert with_sign.ids_of_tokens(both)[1].tolist() == [True, True, False, False, True, False]
    assert WITH_UNKNOWN.ids_of_tokens(both)[1].tolist() == [True, True, True, True, False, True]
    both = CharTokenizer.union([LATIN, WITH_UNKNOWN])
    assert both.has_unknown
    assert not CharTokenizer.union([WITH_BYTES, WITH_UNKNOWN]).has_unknown
    assert not LATIN.ids_of_tokens(both)[1][-1]
    assert WITH_UNKNOWN.ids_of_tokens(both)[0][-1] == WITH_UNKNOWN.replacement_id


def test_a_character_spelled_by_bytes_has_no_probability_as_a_single_token() -> None:
    mixed = mix(noisy_runs(WITH_BYTES, CharTokenizer("\n abé")))
    _, is_known = WITH_BYTES.ids_of_tokens(mixed.tokenizer)
    assert not is_known[mixed.tokenizer.characters.index("é")]
    texts = sample(mixed, length=300, seed=1, num_samples=3, temperature=1.0)
    assert all("\ufffd" not in text for text in texts)
    assert any(ord(character) > 0xFF for text in texts for character in text)  # by bytes
    assert any("é" in text for text in texts)


@pytest.mark.parametrize("num_sequences", [1, 70])
def test_the_decoder_gives_the_logits_of_the_model(num_sequences: int) -> None:
    model = mix(noisy_runs(LATIN, GREEK, WITH_BYTES), [0.5, 0.3, 0.2]).model
    tokens = random_tokens(num_sequences, steps=40, vocab_size=model.vocab_size).numpy()
    prompt = tokens[:1, :9]  # longer than two of the blocks
    cache = model.new_cache(1)
    with torch.inference_mode():
        model(torch.from_numpy(prompt), cache)
    decoder = build_decoder(model, num_sequences, cache, max_threads=2)
    plain = ModelDecoder(model, num_sequences, cache)
    assert isinstance(decoder, EnsembleDecoder)
    for step in tokens.T:
        expected, found = plain.step(step), decoder.step(step)
        np.testing.assert_allclose(np.exp(found), np.exp(expected), atol=1e-5)


def test_a_longer_block_keeps_its_context_beside_a_shorter_one() -> None:
    short, long = noisy_runs(GREEK, LATIN, block_sizes=(4, 12))
    mixed = mix([short, long], [1e-9, 1 - 1e-9])
    text = "\nab ABC aCb "
    assert mixed.model.block_size == 12
    own, found = probs_after(long, text), probs_after(mixed, text)
    assert [found[each] for each in own] == pytest.approx([*own.values()], abs=1e-5)


@pytest.mark.parametrize("weight", [0, 1])
@pytest.mark.parametrize("num_samples", [1, 70])
def test_a_weight_of_0_or_1_gives_the_texts_of_a_single_run(weight: int, num_samples: int) -> None:
    parts = noisy_runs(LATIN, GREEK)
    mixed, single = mix(parts, [1 - weight, weight]), parts[weight]
    options = {"seed": 3, "length": 60, "prompt": "\nC C  C C C C"}
    expected = sample(single, num_samples=num_samples, **options)
    assert sample(mixed, num_samples=num_samples, **options) == expected
    assert [*stream(mixed, **options)] == [*stream(single, **options)]


def test_the_text_of_a_mix_does_not_depend_on_the_number_sampled_together() -> None:
    mixed = mix(noisy_runs(LATIN, GREEK))
    options = {"seed": 3, "length": 60, "temperature": 1.0}
    together = sample(mixed, num_samples=70, **options)
    assert sample(mixed, num_samples=3, **options) == together[:3]
    assert "".join(stream(mixed, **options)) == together[0].continuation
    written = {character for text in together for character in text}
    assert written == {*mixed.tokenizer.characters}  # both runs write


def test_sequences_of_a_cache_can_be_reordered() -> None:
    model = mix(noisy_runs(LATIN, GREEK)).model
    tokens, order = random_tokens(3, steps=10, vocab_size=model.vocab_size), torch.tensor([2, 0, 0])
    cache, expected = model.new_cache(3), model.new_cache(3)
    with torch.inference_mode():
        model(tokens[:, :9], cache)
        cache.reorder(order)
        model(tokens[order, :9], expected)
        assert model(tokens[:, 9:], cache).equal(model(tokens[:, 9:], expected))


def test_score_and_evaluate_measure_the_mix() -> None:
    latin, greek = noisy_runs(LATIN, GREEK)
    mixed, text = mix([latin, greek], [0.6, 0.4]), "aC αC\n"
    bits = score(mixed, text).bits
    for number, character in enumerate(text):
        prob = probs_after(mixed, "\n" + text[:number])[character]
        assert bits[number] == pytest.approx(-math.log2(prob), rel=1e-4)
    assert evaluate(mixed, text=text * 9).nats_per_char > 0


def test_a_mix_of_a_mix_is_a_mix() -> None:
    first, second, third = noisy_runs(LATIN, GREEK, LATIN)
    nested = mix([mix([first, second]), third], [0.5, 0.5])
    flat = mix([first, second, third], [0.25, 0.25, 0.5])
    options = {"seed": 1, "length": 50, "prompt": "\nC"}
    assert sample(nested, **options) == sample(flat, **options)


def two_texts(folder: Path) -> list[Run]:
    """Return runs of two texts, in the first of which a character is spelled by bytes."""
    texts = {
        "sea": ("the sea is gray\n" * 9 + "é\n") * 6,
        "sun": "die Sonne lacht, né\n" * 50,
    }
    runs = []
    for name, text in texts.items():
        (folder / name).mkdir()
        values = {"text.min_count": 20, "text.mixture_characters": 100}
        runs.append(noisy_run_on(folder / name, text, **values))
    assert runs[0].tokenizer.has_bytes
    return runs


def test_the_text_of_a_mix_is_the_texts_of_its_runs(tmp_path: Path) -> None:
    parts = two_texts(tmp_path)
    mixed = mix(parts)
    corpus = mixed.corpus()
    for split in SPLITS:
        own = "".join(part.tokenizer.decode(part.corpus().split(split)) for part in parts)
        # with é as the one token that sampling and encoding give it
        assert corpus.split(split).tolist() == mixed.tokenizer.encode(own).tolist()
    trained = [mixed.tokenizer.decode(tokens) for tokens in mixed.texts()]
    assert trained == [part.tokenizer.decode(part.texts()[0]) for part in parts]


def test_a_place_in_the_text_of_a_mix_is_one_in_the_file_of_its_run(tmp_path: Path) -> None:
    parts = two_texts(tmp_path)
    corpus = mix(parts).corpus()
    training = corpus.tokenizer.decode(corpus.split("train"))
    # a line after many bytes, and one of the second text
    for part, wanted in zip(parts, ("é\nthe", "né\n"), strict=True):
        path = Path(str(part.config.text.path))
        own = path.read_text(encoding="utf-8")
        place = corpus.place_of(training.rindex(wanted))
        assert place is not None
        assert Path(place.path).resolve() == path
        held_out = part.corpus().count_characters("mixture")
        end = held_out + part.corpus().count_characters("train")
        assert place.line == own[: own.rindex(wanted, held_out, end)].count("\n") + 1


def test_runs_are_not_mixed_if_only_one_has_documents() -> None:
    documents = noisy_run(CharTokenizer("\nab", eos_token="\n"))
    with pytest.raises(RunError, match="documents"):
        mix([noisy_run(LATIN), documents])
    assert mix([documents, documents]).tokenizer.eos_token == "\n"


def test_a_mix_of_documents_ends_where_one_of_its_runs_ends_a_document() -> None:
    first, second = CharTokenizer("\nab", eos_token="\n"), CharTokenizer("\nbé", eos_token="\n")
    texts = sample(mix(noisy_runs(first, second)), num_samples=20, seed=1, length=200)
    assert {text.ended for text in texts} == {"document"}
    assert not any("\n" in text for text in texts)


@pytest.mark.parametrize(
    "weights", [[0.5], [0.7, 0.4], [1.5, -0.5], [math.nan, 1.0], 0.3, [0.0, 0.0], ["0.5", "0.5"]]
)
def test_weights_that_are_not_a_distribution_are_rejected(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weights"):
        chargpt.mix(noisy_runs(LATIN, GREEK), weights)
    with pytest.raises(ConfigError, match="list of runs"):
        chargpt.mix(noisy_run(LATIN))  # type: ignore[arg-type]


def test_a_mixed_run_says_what_it_is_and_has_no_curves() -> None:
    mixed = mix(noisy_runs(LATIN, GREEK), [0.75, 0.25])
    assert repr(mixed).startswith("MixedRun(0.75 Run(")
    assert "MixedRun" in mixed._repr_html_()
    with pytest.raises(ChargptError, match="parts"):
        _ = mixed.metrics


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mix")
    for name, text in (("en", "the sea was gray\n" * 60), ("el", "η θάλασσα ήταν γκρι\n" * 60)):
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        run_here("train", f"{name}.txt", *QUICK, "--out", name, cwd=folder)
    return {name: folder / name for name in ("en", "el")}


@pytest.mark.parametrize(("weight", "single"), [("0", "en"), ("1", "el")])
def test_mix_0_and_1_print_the_text_of_a_single_run(
    trained: dict[str, Path], cli: Cli, weight: str, single: str
) -> None:
    for form in (["-n", "60"], ["-n", "30", "--num-samples", "70", "--json"]):
        options = ["--seed", "2", *form, "--device", "cpu"]
        mixed = cli("sample", trained["en"], trained["el"], "--mix", weight, *options)
        assert mixed.returncode == 0, mixed.stderr
        assert mixed.stdout == cli("sample", trained[single], *options).stdout


def test_the_mix_of_two_languages_writes_in_both(trained: dict[str, Path], cli: Cli) -> None:
    done = cli("sample", trained["en"], trained["el"], "--mix=0.4", "--seed=1", "-n", 300, "--json")
    result = json.loads(done.stdout)
    weights = [0.6, 0.4]
    assert result["mix"] == [
        {"run": str(trained[name]), "step": 6, "weight": weight}
        for name, weight in zip(("en", "el"), weights, strict=True)
    ]
    written = {*result["samples"][0]}
    assert written & {*"theswagry"}
    assert written & {*"ηθάλσήτνγκρι"}


def test_score_mixes_with_another_run(trained: dict[str, Path], cli: Cli) -> None:
    text = trained["en"].parent / "both.txt"
    text.write_text("the sea η θάλασσα\n", encoding="utf-8")
    words = ["score", trained["en"], text, "--with", trained["el"], "--mix", 0.25, "--json"]
    result = json.loads(cli(*words).stdout)
    mixed = mix([trained["en"], trained["el"]], [0.75, 0.25])
    expected = score(mixed, text.read_text(encoding="utf-8"))
    assert result["bits_per_char"] == pytest.approx(expected.bits_per_char)
    assert [each["weight"] for each in result["mix"]] == [0.75, 0.25]


def test_overlap_names_the_file_of_the_run_whose_text_is_copied(
    trained: dict[str, Path], cli: Cli
) -> None:
    runs = [trained["en"], trained["el"]]
    mixed, copied = mix(runs), "η θάλασσα ήταν γκρι\n"
    report = measure_overlap(mixed.corpus(), [copied])
    place = mixed.corpus().place_of(report.texts[0].matches[0].position)
    assert place is not None
    assert Path(place.path).name == "el.txt"
    done = cli("sample", *runs, "--overlap", "--seed", 1)
    assert done.returncode == 0, done.stderr


def test_the_mixtures_of_mixed_runs_are_mixed(tmp_path: Path) -> None:
    text = REPOSITORY / "data" / "lighthouse.txt"
    run_here("train", text, *MIXED_WORDS, "--out", "run", cwd=tmp_path)
    own, other = with_mixture(tmp_path / "run"), noisy_run(LATIN)
    mixed = with_mixture(mix([tmp_path / "run", own], [0.4, 0.6]))
    assert sample(mixed, seed=1, length=50) == sample(own, seed=1, length=50)
    with pytest.raises(RunError, match="no mixture"):
        with_mixture(mix([own, other]))
