"""Verbatim overlap of samples with the training split, for `chargpt sample --overlap`."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from chargpt.analysis.memorization import MIN_MATCH, OverlapReport, find_documents, measure_overlap
from chargpt.cli import console, tables
from chargpt.config import SampleConfig
from chargpt.text.corpus import Corpus, Place
from chargpt.text.display import display_text, whole_graphemes

MAX_SHOWN = 10  # matches in the table
MAX_LOCATED = 100  # matches in JSON with their place; each is a search of the whole text
MAX_PASSAGE = 80  # characters of a match in the table


@dataclass(frozen=True)
class SampleOverlap:
    """Overlap of samples with the text of their run.

    Attributes:
        finished: those samples that ended by themselves, with their prompts.
    """

    corpus: Corpus
    report: OverlapReport
    finished: list[str]

    def places(self, max_passages: int) -> dict[str, Place]:
        """Return where the longest matches stand in the files of the training split."""
        passages = [match.text for match in self.report.longest_matches()[:max_passages]]
        return self.corpus.find_places(passages)

    def to_json(self, texts: list[str]) -> dict[str, Any]:
        """Return the overlap of each sample, with places, and which documents are new or copied."""
        places, overlaps = self.places(MAX_LOCATED), []
        for each in self.report.texts:
            values = dataclasses.asdict(each)
            for match in values["matches"]:
                place = places.get(match["text"])
                match |= place._asdict() if place else dict.fromkeys(Place._fields)
            overlaps.append({"longest": next(iter(values["matches"]), None), **values})
        result: dict[str, Any] = {"overlap": overlaps}
        if self.corpus.tokenizer.eos_token:  # else a text is no document
            ended = [text if text in self.finished else None for text in texts]
            known, copied = self.report.known, self.report.copied
            result["new"] = [None if each is None else each not in known for each in ended]
            result["copied"] = [None if each is None else each in copied for each in ended]
        return result


def measure(corpus: Corpus, texts: list[str], sampling: SampleConfig) -> SampleOverlap:
    """Return the overlap of samples without their prompt, with progress on stderr."""
    finished = [text for text in texts if is_finished(text, sampling)]
    sampled = [text[len(sampling.prompt) :] for text in texts]
    with console.show_progress("character", "of the training split") as on_progress:
        report = measure_overlap(corpus, sampled, finished, on_progress)
    return SampleOverlap(corpus, report, finished)


def is_finished(text: str, settings: SampleConfig) -> bool:
    """Return whether a sample ended before its length, at the EOS token or a stop string."""
    return len(text) < len(settings.prompt) + settings.length


def mark(text: str, spans: list[tuple[int, int]]) -> str:
    """Return a text with its verbatim matches in brackets that rarely occur in texts."""
    for start, end in reversed(whole_graphemes(text, spans)):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    return text


def print_overlap(overlap: SampleOverlap, texts: list[str], sampling: SampleConfig) -> None:
    """Print what was found below the samples: documents or lines that are new, and the matches."""
    report, finished = overlap.report, overlap.finished
    has_documents = bool(overlap.corpus.tokenizer.eos_token)
    if has_documents and finished:
        groups = {"sampled": finished, "distinct": set(finished)}
        print_new("documents", groups, report.copied, report.known)
    whole, longest = "whole documents or ", ""
    if not has_documents:
        whole, matches = "", report.longest_matches()
        lengths = (matches[0].length if matches else 0, report.longest_in_val)
        own, median = (f"{n:,}" if n else f"under {MIN_MATCH}" for n in lengths)
        longest = (
            f"; the longest: {own} characters (the median of equally long parts of the validation "
            f"split: {median})"
        )
    console.out_sentence(
        f"⟦…⟧: verbatim matches of {whole}{MIN_MATCH} characters or more with the training split"
        f"{longest}"
    )
    print_matches(overlap)
    print_novel(overlap)
    # lines that the model has ended, with what the prompt has of the first
    first = texts[0].rfind("\n", 0, len(sampling.prompt)) + 1
    lines = {line for text in texts for line in text[first:].split("\n")[:-1] if line}
    if len(lines) > 1 and not has_documents:
        print_new("lines", {"distinct": lines}, *find_documents(overlap.corpus, lines, "\n"))


def print_new(
    kind: str,
    groups: Mapping[str, Collection[str]],
    copied: Collection[str],
    known: Collection[str],
) -> None:
    """Print how many documents or lines of each group are new, copied, or only in other splits."""
    rows = []
    for name, texts in groups.items():
        n_new = sum(text not in known for text in texts)
        n_copied = sum(text in copied for text in texts)
        numbers = (len(texts), n_new, n_copied, len(texts) - n_new - n_copied)
        rows.append([name, *(f"{number:,}" for number in numbers)])
    columns = ["number", "not in the text", "in the training split", "in others"]
    tables.table([kind, *columns], rows)


def print_matches(overlap: SampleOverlap) -> None:
    """Print the longest different matches, a line each, with their place in the text."""
    places = overlap.places(MAX_SHOWN)
    rows = [
        [f"{each.length:,}", str(places.get(each.text, "-")), display_text(each.text[:MAX_PASSAGE])]
        for each in overlap.report.longest_matches()[:MAX_SHOWN]
    ]
    if rows:
        tables.table(["characters", "file and line", "longest matches"], rows, text_column=2)


def print_novel(overlap: SampleOverlap) -> None:
    """Print the fractions of novel n-grams, beside those of validation text."""
    rows = overlap.report.novel_rows()
    if rows:
        tables.table(["n", "novel n-grams", "of validation text"], rows)
        console.out_sentence(
            "novel n-grams: fraction of those of the samples that are not in the training split, "
            "and their number. From n = 20 on, fewer than in the validation text means copying; of "
            "short n-grams there are also fewer at a low temperature. Validation text: "
            f"{overlap.report.val_characters:,} of the "
            f"{console.characters(overlap.corpus.count_characters('val'))} of the validation split"
        )
