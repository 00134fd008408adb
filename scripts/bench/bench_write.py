"""Benchmark of constrained sampling: characters per second beside plain sampling, and its promises.

    python scripts/bench/bench_write.py RUN [--repeats 3] [--json benchmarks/write.json]

RUN was trained on a text, not on documents. Every case samples the same number of characters, one
text alone and 64 texts together, in turn with plain sampling. `promises` counts what must be 0: of
200 texts of 500 characters with `no_copy` 20, those of which a longer stretch stands in the text
(searched for by Python's `in`), and of 50 texts of each constraint, those that do not satisfy it.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import provenance, save_record

import chargpt

LENGTH = 500
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_copy=20": {"no_copy": 20},
    "match": {"match": r"(?s)[A-Z].*[.!?]"},
    "without": {"without": "e"},
    "word": {"word": ["night", "day"]},
    "lines, end": {"lines": 4, "end": "ay"},
    "acrostic": {"acrostic": "SONG"},
    "max_chars": {"max_chars": LENGTH},
}


def lines_of(text: str) -> list[str]:
    """Return the lines of a text."""
    return text.split("\n")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"[\w'’-]+", text.lower())


PROMISES: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"match": "[A-Z][a-z]+"}, re.compile("[A-Z][a-z]+").fullmatch),
    ({"match": r"\w+ \w+ \w+"}, re.compile(r"\w+ \w+ \w+").fullmatch),
    ({"match": r"(?s)O, .*!"}, lambda text: text[:3] == "O, " and text[-1] == "!"),
    ({"match": r"[A-Z]+:\n[^\n]+\n"}, re.compile(r"[A-Z]+:\n[^\n]+\n").fullmatch),
    ({"match": "(?:[a-z]{3} ){5}"}, re.compile("(?:[a-z]{3} ){5}").fullmatch),
    ({"without": "e"}, lambda text: not set(text) & set("eE")),
    ({"without": "aeiou"}, lambda text: not set(text.lower()) & set("aeiou")),
    ({"without": "\n"}, lambda text: "\n" not in text),
    ({"only": "aeioustrnl"}, lambda text: set(re.sub(r"[\W\d_]", "", text.lower())) <= set(ONLY)),
    ({"word": "moon"}, lambda text: "moon" in words_of(text)),
    ({"word": ["night", "day"]}, lambda text: {"night", "day"} <= set(words_of(text))),
    ({"lines": 1}, lambda text: text.strip() and "\n" not in text),
    ({"lines": 4}, lambda text: [bool(line.strip()) for line in lines_of(text)] == [True] * 4),
    ({"acrostic": "MOON"}, lambda text: [line[:1] for line in lines_of(text)] == list("MOON")),
    (
        {"acrostic": ["The ", "And "], "lines": 3},
        lambda text: re.fullmatch("The .*\nAnd .*\n.+", text),
    ),
    (
        {"end": "ight"},
        lambda text: all(re.search(r"ight[^\w\n]*$", line) for line in lines_of(text)),
    ),
    (
        {"lines": 2, "end": "ay"},
        lambda text: [bool(re.search(r"ay[^\w\n]*$", x)) for x in lines_of(text)] == [True] * 2,
    ),
    ({"max_chars": 80}, lambda text: len(text) <= 80),
    (
        {"without": "u", "word": "love", "lines": 2},
        lambda text: "u" not in text.lower() and "love" in words_of(text) and text.count("\n") == 1,
    ),
    (
        {"no_copy": 8, "word": "king", "max_chars": 120},
        lambda text: len(text) <= 120 and "king" in words_of(text),
    ),
]
ONLY = "aeioustrnl"
SHORT: dict[str, Any] = {"length": 200}


def speed(run: chargpt.Run, number: int, options: dict[str, Any]) -> float:
    """Return the characters per second of sampling so many texts, after the rules are built."""
    length: dict[str, Any] = {} if "max_chars" in options else {"length": LENGTH}
    start = time.perf_counter()
    texts = chargpt.sample(run, num_samples=number, seed=1, **length, **options)
    return sum(map(len, texts)) / (time.perf_counter() - start)


def longest_copied(text: str, source: str) -> int:
    """Return the length of the longest part of a text that stands in the source."""
    longest = start = 0
    for end in range(1, len(text) + 1):
        while text[start:end] not in source:
            start += 1
        longest = max(longest, end - start)
    return longest


def main() -> None:
    """Measure every case in turn and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run = chargpt.load_run(arguments.run, checkpoint="latest")
    corpus = run.corpus()
    source = corpus.tokenizer.decode(corpus.tokens)
    plain = chargpt.sample(run, num_samples=200, length=LENGTH, seed=1)
    checked = chargpt.sample(run, num_samples=200, length=LENGTH, seed=1, no_copy=20)
    record: dict[str, Any] = {
        **provenance(),
        "longest_copied": {
            "plain": max(longest_copied(text, source) for text in plain),
            "no_copy=20": max(longest_copied(text, source) for text in checked),
        },
        "promises": {
            str(options): sum(
                not holds(text)
                for text in chargpt.sample(run, num_samples=50, seed=2, **SHORT, **options)
            )
            for options, holds in PROMISES
        },
    }
    speeds: dict[str, list[float]] = {}
    for _ in range(arguments.repeats + 1):
        for number in (1, 64):
            for name, options in CASES.items():
                speeds.setdefault(f"{name}, {number}", []).append(speed(run, number, options))
    medians = {name: round(statistics.median(values[1:])) for name, values in speeds.items()}
    first = {name: round(values[0]) for name, values in speeds.items()}
    record |= {"characters_per_second": medians, "the first time": first}
    save_record(record, arguments.json)
    print(record)


if __name__ == "__main__":
    main()
