"""The metrics log `metrics.jsonl`: one JSON object per line, of numbers and sampled text.

Each line ends with the CRC-32 of the object without it, `crc32`. Those that earlier versions have
written, at the beginning of a log, have none; the state of a run says whether it may have such.
"""

import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from chargpt.errors import RunError
from chargpt.files import open_regular, reading, write_atomically
from chargpt.log import logger
from chargpt.store.checkpoint import RunState

VALIDATION = "val_nats_per_char"
MAX_METRICS_BYTES = 2_000_000_000  # about 100 bytes per step
MAX_LINE_BYTES = 10_000_000
# Of the lines of records in memory, and an addition for each: they take up to ten times that.
MAX_KEPT_BYTES, RECORD_BYTES = 40_000_000, 100
MAX_VALUE = 1e39  # beyond it no float32 is finite
CHECKSUM = re.compile(rb', "crc32": ([0-9]{1,10})\}.?\Z', re.DOTALL)  # the end of a line
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
        """Append a line each, after any lines that are not written yet.

        Raises:
            OSError: the write failed; the lines are kept for the next call.
        """
        self.hold(*records)
        size = 0
        with suppress(FileNotFoundError):
            status = self.path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", str(self.path))
            size = status.st_size
        try:
            with open(self.path, "a", encoding="utf-8", newline="\n") as file:
                file.writelines(self.unwritten)
        except OSError:
            with suppress(OSError):
                os.truncate(self.path, size)  # a full disk may have taken a part of a line
            raise
        self.unwritten.clear()

    def hold(self, *records: Mapping[str, object]) -> None:
        """Keep records for the next `append`."""
        self.unwritten += [to_line(record) for record in records]

    def records(self, *, requires_checksums: bool = False) -> list[dict[str, Any]]:
        """Return the records in order, without damaged lines, whose number is logged.

        Of a log of more than MAX_KEPT_BYTES, every second record is left out, and so on: first only
        records without a validation loss, if these are enough.

        Raises:
            UnreadableError: the system cannot read the file.
            RunError: it is not a regular file, or too large.
        """
        kept: list[tuple[int, dict[str, Any]]] = []  # with the bytes of each
        n_bytes, every, damaged = 0, 1, 0
        with reading(self.path):
            for number, (line, record) in enumerate(self._parsed(requires_checksums)):
                damaged += record is None and is_damage(line)
                if record is not None and (number % every == 0 or VALIDATION in record):
                    kept.append((len(line) + RECORD_BYTES, record))
                    n_bytes += len(line) + RECORD_BYTES
                while n_bytes > MAX_KEPT_BYTES and len(kept) > 1:
                    kept, every = _thinned(kept), 2 * every
                    n_bytes = sum(size for size, _ in kept)
        if damaged:
            logger.warning(f"damaged lines of {self.path}, left out: {damaged:,}")
        return [record for _, record in kept]

    def _parsed(self, has_checksums: bool = False) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Yield the lines with their records, None if damaged; none if there is no file."""
        try:
            with open_regular(self.path, MAX_METRICS_BYTES) as file:
                while line := file.readline(MAX_LINE_BYTES):
                    record = parse_record(line, requires_checksum=has_checksums)
                    has_checksums |= record is not None and CHECKSUM.search(line) is not None
                    yield line, record
        except FileNotFoundError:
            return
        except ValueError as error:
            raise RunError(f"{self.path} cannot be read ({error}); restore or delete it") from None

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps, which a resumed run repeats; keep all other lines.

        On an OSError or RunError the file is unchanged.
        """
        self.unwritten.clear()
        kept = (line for line, record in self._parsed() if (record or {"step": 0})["step"] <= step)
        # a longer line comes in parts, and only a line that a crash has cut lacks its end
        write_atomically(
            self.path,
            (part if len(part) == MAX_LINE_BYTES else part.rstrip(b"\n") + b"\n" for part in kept),
        )

    def problems(self, state: RunState) -> list[str]:
        """Return sentences: damaged lines, steps missing or repeated, another best loss."""
        step, best, found = state.step, state.best_nats_per_char, None
        n_lines = damaged = n_steps = n_repeated = last = 0
        for line, record in self._parsed(state.metrics_have_checksums):
            n_lines += bool(line.strip())
            damaged += record is None and is_damage(line)
            if record is None:
                continue
            if VALIDATION in record and record["step"] == state.best_step:
                found = record[VALIDATION]
            if "loss" in record and record["step"] <= last:
                n_repeated += 1
            elif "loss" in record and record["step"] <= step:
                n_steps, last = n_steps + 1, record["step"]
        problems = []
        if damaged:
            problems.append(f"{self.path} has damaged lines: {damaged:,} of {n_lines:,}")
        if missing := step - n_steps:
            problems.append(f"{self.path} lacks the training loss of {missing:,} of {step:,} steps")
        if n_repeated:
            problems.append(f"{self.path} repeats steps: {n_repeated:,}")
        if best is not None and state.best_step is not None and found != best:
            problems.append(
                f"{self.path} does not have the validation loss of the best checkpoint, {best:.4f} "
                f"at step {state.best_step:,}; it was changed, or is of another run"
            )
        return problems


def to_line(record: Mapping[str, object]) -> str:
    """Return the line of a record, with its checksum."""
    content = json.dumps(record)
    return f'{content[:-1]}, "crc32": {zlib.crc32(content.encode())}}}\n'


def is_damage(line: bytes) -> bool:
    """Return whether a line without a record is damaged: not empty, nor cut short by a crash."""
    return bool(line.strip()) and line.endswith(b"\n")


def parse_record(line: bytes, *, requires_checksum: bool = False) -> dict[str, Any] | None:
    """Return the record in a line, without its checksum; None if it is damaged."""
    end = CHECKSUM.search(line)
    if end is None and requires_checksum:
        return None
    if end is not None:
        line = line[: end.start()] + b"}"
        if zlib.crc32(line) != int(end[1]):
            return None
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


def _thinned(records: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    kept = [r for number, r in enumerate(records) if number % 2 == 0 or VALIDATION in r[1]]
    return kept if len(kept) < 0.75 * len(records) else records[::2]
