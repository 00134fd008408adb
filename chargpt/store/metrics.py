"""The metrics log `metrics.jsonl`: one JSON object per line, of numbers and sampled text."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chargpt.errors import RunError
from chargpt.files import read_regular, write_atomically

VALIDATION = "val_nats_per_char"
MAX_METRICS_BYTES = 2_000_000_000  # about 100 bytes per step


def validation_curve(records: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return (step, validation loss in nats per character) of the records that have one."""
    return [(record["step"], record[VALIDATION]) for record in records if VALIDATION in record]


class MetricsLog:
    """An append-only log of training metrics, one record per line, each with its `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten: list[str] = []  # lines whose write failed

    def append(self, record: Mapping[str, object]) -> None:
        """Append one line, after any lines whose earlier write failed.

        Raises:
            OSError: the write failed; the line is kept for the next call.
        """
        # a failed write may have left part of a line: end it
        prefix = "" if not self._unwritten else "\n"
        self._unwritten.append(json.dumps(record) + "\n")
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(prefix + "".join(self._unwritten))
        self._unwritten.clear()

    def records(self) -> list[dict[str, Any]]:
        """Return the records in order, without malformed lines (a crash may cut the last short).

        Raises:
            RunError: the file is not a regular file, or too large.
        """
        try:
            content = read_regular(self.path, MAX_METRICS_BYTES)
        except OSError:
            return []
        except ValueError as error:
            raise RunError(f"{self.path} cannot be read ({error}); restore or delete it") from None
        records = []
        for line in content.decode(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if (
                isinstance(record, dict)
                and isinstance(record.get("step"), int)
                and all(
                    isinstance(value, str if key == "sample" else int | float)
                    for key, value in record.items()
                )
            ):
                records.append(record)
        return records

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps, which a resumed run repeats.

        Raises:
            OSError: the write failed.
            RunError: the file is not a regular file, or too large.
        """
        self._unwritten.clear()
        kept = [record for record in self.records() if record["step"] <= step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(self.path, text.encode())
