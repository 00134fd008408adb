"""Which sampled sequences become samples: all, or by rejection those that are new and distinct."""

import math
from collections.abc import Sequence

from chargpt.config import SampleConfig
from chargpt.errors import ConfigError, TooFewError
from chargpt.inference.constraints import CONSTRAINTS
from chargpt.inference.sampling import Ended, Piece
from chargpt.store.run import Run
from chargpt.text.documents import find_documents

MAX_REJECTED = 1_000  # sequences in a row, before `new` or `distinct` gives up
MIN_GROUP = 32  # sequences sampled together where some are rejected: fewer take as long


class Sample(str):
    """A sampled text: the prompt and its continuation.

    Attributes:
        prompt: its beginning.
        ended: by its `length`, before a `stop` string, at the end of a `document`, where it
            matches and the next token would not (`match`), after the last `sentence` of
            `max_chars`, or `stopped` from outside.
        surprisal: mean bits per sampled character, -log2 of its probability before temperature and
            filters; of all that was sampled, also the stop string or end of the document. NaN if
            nothing was.
        sequence_id: number of its sequence, from 0: with the seed it decides the text.
    """

    prompt: str
    ended: Ended
    surprisal: float
    sequence_id: int

    @property
    def text(self) -> str:
        """The whole text as a plain string."""
        return str(self)

    @property
    def continuation(self) -> str:
        """The text without the prompt."""
        return self[len(self.prompt) :]

    @property
    def finished(self) -> bool:
        """Whether a stop string, the end of a document or that of a match has ended it."""
        return self.ended in ("stop", "document", "match")

    @property
    def is_document(self) -> bool:
        """Whether it is a whole document, with what the prompt holds of it."""
        return self.ended == "document"


def new_sample(
    prompt: str,
    continuation: str,
    ended: Ended,
    surprisal: float = math.nan,
    sequence_id: int = 0,
) -> Sample:
    """Return a sample; without a constructor of its own, its class can be pickled."""
    sample = Sample(prompt + continuation)
    sample.prompt, sample.ended, sample.surprisal = prompt, ended, surprisal
    sample.sequence_id = sequence_id
    return sample


def counts_samples(run: Run, options: SampleConfig) -> bool:
    """Return whether progress is counted in samples: their lengths are not known in advance."""
    names = ("new", "distinct", "stop", "max_chars", *CONSTRAINTS)
    return bool(run.tokenizer.eos_token) or any(getattr(options, name) for name in names)


class Selection:
    """Which sequences become samples: all, or by rejection those that are new and distinct.

    They are accepted in the order of their numbers, so they do not depend on the groups.

    Raises:
        ConfigError: `options.new`, and the run has no documents.
        RunError: `options.new`, and the run has no text.
    """

    def __init__(self, run: Run, options: SampleConfig) -> None:
        self.run, self.options = run, options
        self.rejects = options.new or options.distinct
        self.n_tried = self.n_found = self.n_cut = 0  # n_cut: at their length
        self.n_rejected = 0  # in a row, the last ones
        self.seen: set[str] = set()  # continuations
        self.is_known: dict[str, bool] = {}  # of documents that were looked up
        if not options.new:
            return
        if not run.tokenizer.eos_token:
            raise ConfigError(
                f"new samples are whole documents, and the text of {run.folder} is no list of "
                "them; train with -s text.documents=lines, files or a separator, or do without new"
            )
        self.corpus = run.corpus()

    @property
    def is_done(self) -> bool:
        """Whether enough are found, or too many in a row were rejected."""
        return self.n_found >= self.options.num_samples or self.n_rejected >= MAX_REJECTED

    def next_ids(self, largest: int) -> range:
        """Return the next sequences to sample, at most `largest`: what it takes at the rate so far.

        Where some are rejected, those that were sampled beyond the last accepted one are wasted.
        """
        size = self.options.num_samples - self.n_found
        if self.rejects and self.n_tried:
            n_likely = size * self.n_tried // max(1, self.n_found)
            size = max(MIN_GROUP, min(n_likely, MAX_REJECTED - self.n_rejected))
        return range(self.n_tried, self.n_tried + min(size, largest))

    def progress(self, n_steps: int, step: Sequence[Piece]) -> tuple[int, int]:
        """Return what is done after a step of the next sequences, and the total.

        Of samples, or where no text can end before its length, of characters.
        """
        total, length = self.options.num_samples, self.options.limit
        if self.rejects:
            return self.n_found, total
        if counts_samples(self.run, self.options):
            return self.n_found + sum(bool(piece.ended) for piece in step), total
        return self.n_found * length + min(n_steps, length) * len(step), total * length

    def accept(self, group: list[Sample]) -> list[Sample]:
        """Return those of the next sequences that become samples."""
        if self.options.new:
            self._look_up(group)
        accepted = []
        for each in group:
            if self.is_done:
                break
            self.n_tried += 1
            self.n_cut += each.ended == "length"
            if (self.options.new and not self._is_new(each)) or (
                self.options.distinct and each.continuation in self.seen
            ):
                self.n_rejected += 1
                continue
            if self.options.distinct:
                self.seen.add(each.continuation)
            self.n_found, self.n_rejected = self.n_found + 1, 0
            accepted.append(each)
        return accepted

    def _document(self, sample: Sample) -> str:
        """Return the document that a text ends with: its prompt may hold the ends of others."""
        return sample.rpartition(self.run.tokenizer.eos_token)[2]

    def _is_new(self, sample: Sample) -> bool:
        """Return whether a text that was looked up is a whole document, not blank, and new."""
        document = self._document(sample)
        return sample.is_document and bool(document.strip()) and not self.is_known[document]

    def _look_up(self, group: list[Sample]) -> None:
        wanted = {self._document(each) for each in group if each.is_document}
        wanted -= self.is_known.keys()
        _, known = find_documents(self.corpus, wanted, self.run.tokenizer.eos_token)
        self.is_known |= {document: document in known for document in wanted}

    def require_enough(self) -> None:
        """Raise TooFewError if the search has ended with too few."""
        if self.n_found >= self.options.num_samples or self.n_rejected < MAX_REJECTED:
            return
        kinds = [kind for kind in ("new", "distinct") if getattr(self.options, kind)]
        is_cut = self.options.new and self.n_cut > self.n_tried / 2
        remedy = "length, which cut most of them" if is_cut else "temperature"
        raise TooFewError(
            f"found {self.n_found:,} of {self.options.num_samples:,} {' and '.join(kinds)} samples "
            f"in {self.n_tried:,} sequences, none in the last {MAX_REJECTED:,}; raise the {remedy}"
        )
