"""The metrics log `metrics.jsonl`: one JSON object per line, of numbers and sampled text."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from chargpt.errors import RunError
from chargpt.files import open_regular, write_atomically
from chargpt.store.commit import read_error

VALIDATION = "val_nats_per_char"
MAX_METRICS_BYTES = 2_000_000_000  # about 100 bytes per step
MAX_LINE_BYTES = 10_000_000
MAX_RECORDS = 200_000  # in memory: about 100 MB
MAX_VALUE = 1e39  # beyond it no float32 is finite
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def validation_curve(records: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return (step, validation loss in nats per character) of the records that have one."""
    return [(record["step"], record[VALIDATION]) for record in records if VALIDATION in record]


class MetricsLog:
    """An append-only log of training metrics, one record per line, each with its `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unwritten: list[str] = []  # lines whose write failed, for the next `append`

    def append(self, *records: Mapping[str, object]) -> None:
        """Append a line each, after any lines whose earlier write failed.

        Raises:
            OSError: the write failed; the lines are kept for the next call.
        """
        self.unwritten += [json.dumps(record) + "\n" for record in records]
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, "a", encoding="utf-8", newline="\n") as file:
                file.writelines(self.unwritten)
        except OSError:
            with suppress(OSError):
                os.truncate(self.path, size)  # a full disk may have taken a part of a line
            raise
        self.unwritten.clear()

    def records(self) -> list[dict[str, Any]]:
        """Return the records in order, without malformed lines (a crash may cut the last short).

        Of a log of more than MAX_RECORDS records, every second one is left out, and so on: first
        only records without a validation loss, if these are enough.

        Raises:
            UnreadableError: the system cannot read the file.
            RunError: it is not a regular file, or too large.
        """
        kept: list[dict[str, Any]] = []
        every = 1
        try:
            for number, line in enumerate(self._lines()):
                record = parse_record(line)
                if record is not None and (number % every == 0 or VALIDATION in record):
                    kept.append(record)
                if len(kept) == MAX_RECORDS:
                    kept, every = _thinned(kept), 2 * every
        except OSError as error:
            raise read_error(self.path, error) from None
        return kept

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines; none if there is no file."""
        try:
            with open_regular(self.path, MAX_METRICS_BYTES) as file:
                while line := file.readline(MAX_LINE_BYTES):
                    yield line
        except FileNotFoundError:
            return
        except ValueError as error:
            raise RunError(f"{self.path} cannot be read ({error}); restore or delete it") from None

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps, which a resumed run repeats; keep all other lines.

        On an OSError or RunError the file is unchanged.
        """
        self.unwritten.clear()
        kept = (
            line for line in self._lines() if (parse_record(line) or {"step": 0})["step"] <= step
        )
        # a longer line comes in parts, and only a line that a crash has cut lacks its end
        write_atomically(
            self.path,
            (part if len(part) == MAX_LINE_BYTES else part.rstrip(b"\n") + b"\n" for part in kept),
        )

    def problems(self, step: int) -> list[str]:
        """Return a sentence for malformed lines, and one for training steps missing to `step`."""
        n_lines = malformed = n_steps = last = 0
        is_cut = False
        for line in self._lines():
            if not line.strip():  # a failed write came before
                continue
            n_lines += 1
            record = parse_record(line)
            is_cut = record is None and not line.endswith(b"\n")  # by a crash
            malformed += record is None
            if record is not None and "loss" in record and last < record["step"] <= step:
                n_steps, last = n_steps + 1, record["step"]
        malformed -= is_cut
        problems = []
        if malformed:
            problems.append(f"{self.path} has malformed lines: {malformed:,} of {n_lines:,}")
        if missing := step - n_steps:
            problems.append(f"{self.path} lacks the training loss of {missing:,} of {step:,} steps")
        return problems


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, or None if it is malformed."""
    try:
        record = json.loads(line)
        is_valid = (
            isinstance(record, dict)
            and type(record.get("step")) is int
            and 0 <= record["step"] < 10**18
            and all(_is_valid(*item) for item in record.items())
        )
    except (ValueError, RecursionError):
        return None
    return record if is_valid else None


def _is_valid(key: str, value: object) -> bool:
    if key == "sample":
        return isinstance(value, str) and not LONE_SURROGATE.search(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < MAX_VALUE


def _thinned(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [r for number, r in enumerate(records) if number % 2 == 0 or VALIDATION in r]
    return kept if len(kept) < 0.75 * len(records) else records[::2]
