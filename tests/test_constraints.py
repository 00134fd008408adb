"""Constraints on sampled texts: automata, masks, dead ends, and what is never copied."""

import itertools
import math
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from formula import longest_common
from hypothesis import example, given, settings
from hypothesis import strategies as st
from noise import noisy_model, noisy_run_on

from chargpt.config import SampleConfig
from chargpt.errors import ConfigError, OperationError
from chargpt.inference import constraints
from chargpt.inference.constrained import HELD_BACK, ConstrainedSampler, _Sequence, build_rules
from chargpt.inference.constraints import Automaton, compile_tree, parse, product
from chargpt.inference.copying import CopyIndex
from chargpt.inference.generation import sample, stream
from chargpt.inference.sampling import Piece
from chargpt.models import LanguageModel
from chargpt.models.ngram import BigramLM
from chargpt.text.tokenizer import CharTokenizer

ALPHABET = "\n aAbB1é漢"
LETTERS = CharTokenizer("\n !'Tabcdefghinopst")
DOCUMENTS = CharTokenizer("\n abcdefgh", eos_token="\n")
TEXT = "The sea, the light. It's the ship of the night!\nAnd then a bone in the dish?\n" * 9

atoms = st.sampled_from([*"aA1b.é漢", *r"\n \w \W \s \d [aB] [^a] [a-b1] (?i:a) (?-i:a)".split()])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{0,2}?"])).map(
            "(?:{0[0]}){0[1]}".format
        ),
        inner.map("({})".format),
        inner.map("(?s:{})".format),
    ),
    max_leaves=6,
)
flags = st.sampled_from(["", "(?i)", "(?s)", "(?a)"])


def matches(automaton: Automaton, text: str) -> bool:
    state = 0
    for character in text:
        state = int(automaton.next_state[state, automaton.classes[ALPHABET.index(character)]])
        if state < 0:
            return False
    return bool(automaton.accepts[state])


def automaton_of(pattern: str) -> Automaton:
    return compile_tree("--match", parse("--match", pattern), ALPHABET)


@example("(?i)", "(?-i:a)b", ["ab", "aB", "Ab", "AB", ""])
@given(flags, patterns, st.lists(st.text(ALPHABET, max_size=6), min_size=5, max_size=5))
@settings(max_examples=200)
def test_an_automaton_matches_what_python_matches(
    flag: str, pattern: str, texts: list[str]
) -> None:
    automaton = automaton_of(flag + pattern)
    for text in texts:
        assert matches(automaton, text) == bool(re.fullmatch(flag + pattern, text)), text


@given(patterns, patterns, st.lists(st.text(ALPHABET, max_size=5), min_size=5, max_size=5))
@settings(max_examples=50)
def test_a_product_matches_what_both_match(first: str, second: str, texts: list[str]) -> None:
    both = product(automaton_of(first), automaton_of(second))
    for text in texts:
        expected = re.fullmatch(first, text) and re.fullmatch(second, text)
        assert matches(both, text) == bool(expected), text


def sampled(
    model: LanguageModel,
    tokenizer: CharTokenizer = LETTERS,
    prompt: str = "",
    index: CopyIndex | None = None,
    ids: list[int] | None = None,
    **options: Any,
) -> list[Piece]:
    """Return the whole text of each sequence as one piece."""
    chosen = SampleConfig(**({"length": 30, "seed": 3, "temperature": 1.0} | options))
    sampler = ConstrainedSampler(
        model,
        tokenizer,
        tokenizer.encode(tokenizer.eos_token + prompt),
        chosen,
        range(chosen.num_samples) if ids is None else ids,
        rules=build_rules(model, tokenizer, chosen, prompt)._replace(copies=index),
    )
    columns = zip(*sampler.steps(), strict=True)
    return [column[-1]._replace(text="".join(each.text for each in column)) for column in columns]


def lines_of(text: str) -> list[str]:
    return text.split("\n")


def words_of(text: str) -> list[str]:
    return re.findall(r"[\w'’-]+", text.lower())


KINDS: list[tuple[dict[str, Any], Any]] = [  # settings, and what every text of them is
    ({"match": "[ab]{5}"}, lambda text: len(text) == 5 and set(text) <= set("ab")),
    ({"match": "T.*!"}, lambda text: text[0] == "T" and text[-1] == "!" and "\n" not in text),
    ({"match": "(?:ab|cd)+"}, lambda text: re.fullmatch("(ab|cd)+", text)),
    ({"match": r"\w+( \w+){2}"}, lambda text: [len(w) > 0 for w in text.split(" ")] == [True] * 3),
    ({"match": "(?i)THE .*"}, lambda text: text[:4].lower() == "the "),
    ({"match": "a?b?c?"}, lambda text: text in ("", "a", "b", "c", "ab", "ac", "bc", "abc")),
    ({"match": "^abc$"}, lambda text: text == "abc"),
    ({"only": "abt"}, lambda text: set(text) <= set("\n !'abtT")),
    ({"without": "eT"}, lambda text: not set(text) & set("etT")),
    ({"word": "the"}, lambda text: "the" in words_of(text)),
    ({"word": ["sea", "bone"]}, lambda text: {"sea", "bone"} <= set(words_of(text))),
    ({"lines": 3}, lambda text: [bool(line.strip()) for line in lines_of(text)] == [True] * 3),
    ({"lines": 1}, lambda text: text.strip() and "\n" not in text),
    ({"acrostic": "Tea"}, lambda text: [line[0] for line in lines_of(text)] == list("Tea")),
    ({"acrostic": ["The ", "and"], "lines": 3}, lambda text: re.match("The .*\nand", text)),
    ({"end": "IGHT"}, lambda text: all(re.search(r"(?i)ight[ !']*$", x) for x in lines_of(text))),
    ({"end": "ed", "lines": 2}, lambda text: re.fullmatch(r".*ed[ !']*\n.*ed[ !']*", text)),
    ({"without": "a", "word": "the", "lines": 2}, lambda x: "a" not in x and "the" in words_of(x)),
    ({"only": "abcdefgh", "match": "[^ ]+ [^ ]+"}, lambda text: not set(text) & set("inostT")),
    ({"max_chars": 25, "word": "sea"}, lambda text: len(text) <= 25 and "sea" in words_of(text)),
    ({"no_copy": 3, "word": "ship"}, lambda text: "ship" in words_of(text)),
]


@pytest.mark.parametrize(("options", "holds"), KINDS, ids=[str(each) for each, _ in KINDS])
def test_every_sample_satisfies_its_constraint(options: dict[str, Any], holds: Any) -> None:
    """A model with noise for weights would never do so by itself."""
    model = noisy_model(vocab_size=LETTERS.vocab_size)
    copied = LETTERS.encode("the sea at night\n")
    index = CopyIndex([copied], options.get("no_copy", 99), LETTERS.vocab_size)
    pieces = sampled(model, index=index, num_samples=50, **options)
    assert len({piece.text for piece in pieces}) > 1 or options.get("match") == "^abc$"
    for text, ended, _ in pieces:
        assert holds(text), text
        assert len(text) <= 30
        assert ended in ("match", "length", "sentence")


def bigram(characters: str, seed: int = 0) -> BigramLM:
    """Return a bigram model with random probabilities."""
    model = BigramLM(len(characters), 8)
    weights = torch.randn(model.table.weight.shape, generator=torch.Generator().manual_seed(seed))
    model.table.weight.data = weights
    return model.eval()


def accepted_by_rejection(
    model: BigramLM,
    characters: str,
    pattern: str,
    first: str,
    length: int,
    excluded: str = "",
    temperature: float = 1.0,
) -> dict[str, float]:
    """Return the probability of each text that rejection sampling accepts, by going through all.

    Sequences of `length` characters are sampled without a constraint. Of each, the text is what
    comes before the first character after which nothing matches any more; it is rejected if that
    character is excluded.
    """
    prob = (model.table.weight.double() / temperature).softmax(dim=1).tolist()
    sequences = ["".join(each) for each in itertools.product(characters, repeat=length)]
    texts = {each[:n] for each in sequences for n in range(length + 1)}
    begins = {text[:n] for text in texts if re.fullmatch(pattern, text) for n in range(length + 1)}
    found: dict[str, float] = Counter()
    for sequence in sequences:
        n = max(n for n in range(length + 1) if sequence[:n] in begins)
        if re.fullmatch(pattern, sequence[:n]) and sequence[n : n + 1] not in [*excluded]:
            pairs = itertools.pairwise(map(characters.index, first + sequence))
            found[sequence[:n]] += math.prod(prob[v][w] for v, w in pairs)
    return {text: p / sum(found.values()) for text, p in found.items()}


@pytest.mark.parametrize(
    ("pattern", "excluded", "temperature"),
    [
        ("a*b", "", 1),
        ("(ab|ba|c)+", "", 0.8),
        ("a?c?b+", "", 0.5),
        ("[^b]*b[^b]*", "", 1),
        ("c*|abba", "", 1.5),
        ("(ab?){1,3}", "c", 1),
    ],
)
def test_texts_of_a_bigram_model_are_distributed_as_by_rejection_sampling(
    pattern: str, excluded: str, temperature: float
) -> None:
    model, length = bigram("abc"), 6 if excluded else 4
    for character in excluded:  # so that few sequences are accepted
        model.table.weight.data[:, "abc".index(character)] += 2
    expected = accepted_by_rejection(model, "abc", pattern, "a", length, excluded, temperature)
    seeds = range(3 if excluded else 1)
    number = 4_000 * len(seeds)
    tokenizer = CharTokenizer("abc")
    options = {
        "match": pattern,
        "without": excluded or None,
        "length": length,
        "temperature": temperature,
    }
    counts: Counter[str] = Counter()
    for seed in seeds:
        pieces = sampled(model, tokenizer, "a", num_samples=4_000, seed=seed, **options)
        counts.update(piece.text for piece in pieces)
    assert set(counts) <= set(expected)
    for text, p in expected.items():
        deviation = 5 * math.sqrt(p * (1 - p) / number) + 1 / number
        assert abs(counts[text] / number - p) <= deviation, text


@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_no_longer_stretch_is_copied(n: int) -> None:
    source = "the dish\nThat bone is a ship\nat night\n"
    tokens = LETTERS.encode(source * 2)
    pairs = torch.full((LETTERS.vocab_size, LETTERS.vocab_size), 1e-4)
    for first, second in itertools.pairwise(tokens.tolist()):
        pairs[first, second] += 1
    model = BigramLM(LETTERS.vocab_size, 8)
    model.table.weight.data = pairs.log()
    model.eval()
    plain = sampled(model, num_samples=20, length=60, only="abcdefghinostT")
    assert max(longest_common(piece.text, source * 2) for piece in plain) > n
    pieces = sampled(
        model,
        num_samples=20,
        length=60,
        no_copy=n,
        index=CopyIndex([tokens], n, LETTERS.vocab_size),
    )
    for piece in pieces:
        assert len(piece.text) == 60
        assert longest_common(piece.text, source * 2) <= n


def test_an_index_finds_every_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chargpt.inference.copying.CHUNK", 7)
    tokens = np.random.default_rng(1).integers(0, 3, 100).astype(np.uint8)
    index = CopyIndex([tokens[:60], tokens[60:]], 3, 3)
    for context in itertools.product(range(3), repeat=3):
        expected = {
            int(part[i + 3])
            for part in (tokens[:60], tokens[60:])
            for i in range(len(part) - 3)
            if tuple(part[i : i + 3]) == context
        }
        rows, followers = index.followers(np.array([context, context]))
        assert set(followers[rows == 1].tolist()) == set(followers[rows == 0].tolist()) == expected


# what goes on for ever repeats aab; abab is a dead end, and so are most beginnings
FREE = {"aaba", "abaa", "baab", "abab", "bbaa", "bbba"}
COPIED = "c".join(sorted({"".join(four) for four in itertools.product("ab", repeat=4)} - FREE))


def test_dead_ends_are_backed_out_of_and_each_text_is_that_of_its_number_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backed_up, back_up = set[int](), _Sequence.back_up
    monkeypatch.setattr(_Sequence, "back_up", lambda s: (backed_up.add(s.number), back_up(s)))
    tokenizer = CharTokenizer("abc")
    model = bigram("abc")
    index = CopyIndex([tokenizer.encode(COPIED)], 3, 3)
    options = {"match": "[ab]{14}", "length": 14, "index": index, "no_copy": 3}
    together = sampled(model, tokenizer, "a", num_samples=40, **options)
    for number in (0, 7, 39):
        assert sampled(model, tokenizer, "a", ids=[number], **options) == [together[number]]
    for text, _, surprisal in together:
        assert re.fullmatch("[ab]{14}", text)
        assert longest_common("a" + text, COPIED) <= 3
        nats = -sum(
            model.table.weight[tokenizer.encode(first)[0]].log_softmax(0)[token].item()
            for first, token in zip("a" + text, tokenizer.encode(text), strict=False)
        )
        assert surprisal == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)
    assert len(backed_up) > 3  # else this would prove nothing


def test_where_everything_is_copied_an_error_says_so() -> None:
    tokenizer = CharTokenizer("ab")
    index = CopyIndex([tokenizer.encode("aaabbbababbaaab")], 2, 2)
    with pytest.raises(OperationError, match="dead ends: too little matches that"):
        sampled(bigram("ab"), tokenizer, "a", index=index, no_copy=2, length=20)


def test_a_stream_without_copies_is_the_sample_in_pieces(tmp_path: Any) -> None:
    run = noisy_run_on(tmp_path, TEXT)
    options = {"prompt": "The", "length": 3 * HELD_BACK, "no_copy": 4, "seed": 2}
    pieces = list(stream(run, **options))
    (whole,) = sample(run, **options)
    assert "The" + "".join(pieces) == whole
    assert len(pieces) > HELD_BACK  # not at its end alone
    assert longest_common(whole, TEXT) <= 4


def test_the_end_of_a_document_is_never_a_copy() -> None:
    tokenizer = CharTokenizer("\nabc", eos_token="\n")
    model = BigramLM(4, 8).eval()
    likely = {"\n": "a", "a": "bc", "b": "\n", "c": "\n"}
    for first, second in likely.items():
        for token in tokenizer.encode(second):
            model.table.weight.data[tokenizer.encode(first)[0], token] = 50.0
    index = CopyIndex([tokenizer.encode("ab\nac\n" * 9)], 2, 4)
    pieces = sampled(model, tokenizer, index=index, no_copy=2, num_samples=20)
    assert {(piece.text, piece.ended) for piece in pieces} == {
        ("ab", "document"),
        ("ac", "document"),
    }


def test_a_text_that_nothing_may_continue_ends() -> None:
    model = noisy_model(vocab_size=LETTERS.vocab_size)
    for piece in sampled(model, without=LETTERS.characters, num_samples=5):
        assert (piece.text, piece.ended) == ("", "match")


def test_documents_end_by_their_token_only_where_they_match() -> None:
    model = noisy_model(vocab_size=DOCUMENTS.vocab_size)
    pieces = sampled(model, DOCUMENTS, match="[a-h]+ b[a-h]*", num_samples=50, length=12)
    assert {piece.ended for piece in pieces} == {"document", "length"}
    for piece in pieces:
        assert re.fullmatch("[a-h]+ b[a-h]*", piece.text)
        assert len(piece.text) == 12 or piece.ended == "document"


def test_characters_that_the_vocabulary_spells_by_bytes_can_be_demanded(tmp_path: Any) -> None:
    tokenizer = CharTokenizer.fit("the sea \n" * 3 + "é€😀", min_count=3)
    model = noisy_model(vocab_size=tokenizer.vocab_size)
    model.first_continuation_id = tokenizer.first_continuation_id
    for pattern in ("[a-z]{2}(€|é|漢)+[se]?", "(?i:É)[a-z]{3}😀"):
        for text, _, _ in sampled(model, tokenizer, match=pattern, num_samples=20, length=6):
            assert re.fullmatch(pattern, text)
            assert len(text) <= 6


def test_a_constraint_on_the_whole_sample_begins_with_the_prompt() -> None:
    model = noisy_model(vocab_size=LETTERS.vocab_size)
    for text, _, _ in sampled(model, prompt="The s", match="The sea[!]+", whole=True, length=9):
        assert re.fullmatch("ea!+", text)
    with pytest.raises(
        ConfigError, match="the prompt begins no text of these constraints: --match"
    ):
        sampled(model, prompt="a", match="The sea", whole=True)


def test_max_chars_ends_after_the_last_sentence_that_matches(tmp_path: Any) -> None:
    run = noisy_run_on(tmp_path, TEXT)
    texts = sample(run, max_chars=60, num_samples=30, seed=1, temperature=1.0)
    plain = sample(run, length=60, num_samples=30, seed=1, temperature=1.0)
    ends = re.compile(r"[.!?]+(?=\s|$)")
    n_cut = 0
    for text, longer in zip(texts, plain, strict=True):
        assert longer.startswith(text)
        sentences = list(ends.finditer(longer))
        lines = [found.start() for found in re.finditer("\n", longer) if found.start()]
        end = sentences[-1].end() if sentences else lines[-1] if lines else 60
        assert text == longer[:end]
        assert text.ended == ("sentence" if sentences or lines else "length")
        n_cut += len(text) < 60
    assert n_cut > 5


@pytest.mark.parametrize(("options", "total"), [({"lines": 1}, 4), ({"no_copy": 3}, 4 * 30)])
def test_progress_counts_samples_where_lengths_differ(
    tmp_path: Any, options: dict[str, Any], total: int
) -> None:
    seen: list[tuple[int, int]] = []
    run = noisy_run_on(tmp_path, TEXT)
    report = lambda *numbers: seen.append(numbers)  # noqa: E731
    sample(run, num_samples=4, length=30, seed=1, on_progress=report, **options)
    assert seen[-1] == (total, total)


def test_what_an_automaton_may_cost_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern in ("((a{50}){50}){50}", "(?s).*a.{18}", "(" * 5000 + ")" * 5000, "a{99999999999}"):
        with pytest.raises(ConfigError, match="too large a pattern"):
            automaton_of(pattern)
    monkeypatch.setattr(constraints, "MAX_WORK", 1_000)
    with pytest.raises(ConfigError, match="too large a pattern"):
        automaton_of("(a?){400}")
    monkeypatch.setattr(constraints, "MAX_STATES", 100)
    with pytest.raises(ConfigError, match=r"too large a pattern.*in common"):
        product(automaton_of("(a{12})*"), automaton_of("(a{11})*"))
