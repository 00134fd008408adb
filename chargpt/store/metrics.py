"""`metrics.jsonl`: one JSON object a line, each with its `step`; all but a `sample` is numbers."""

import json
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chargpt.errors import RunError
from chargpt.files import write_atomically

VALIDATION = "val_nats_per_char"
MAX_METRICS_BYTES = 2_000_000_000  # a hundred bytes a step


def validation_curve(records: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return (step, validation loss in nats) of the records that have one."""
    return [(record["step"], record[VALIDATION]) for record in records if VALIDATION in record]


class MetricsLog:
    """What a run records as it goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten: list[str] = []  # lines that the disk has refused so far

    def append(self, record: Mapping[str, object]) -> None:
        """Add one line; lines that the disk refuses are kept for the next time.

        Raises:
            OSError: the disk refused.
        """
        # a line that was refused may stand there in part: it ends here
        fresh = "" if not self._unwritten else "\n"
        self._unwritten.append(json.dumps(record) + "\n")
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(fresh + "".join(self._unwritten))
        self._unwritten.clear()

    def records(self) -> list[dict[str, Any]]:
        """Return the recorded lines in order, skipping any that a crash cut short.

        Raises:
            RunError: the file is not a plain one, or far too large.
        """
        try:
            facts = self.path.lstat()
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_METRICS_BYTES:
                raise RunError(f"{self.path} is not what a run writes; restore or delete it")
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        records = []
        for line in lines:
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
        """Drop lines of steps that a resumed run will do again.

        Raises:
            OSError: the disk refused.
            RunError: the file is not a plain one, or far too large.
        """
        self._unwritten.clear()
        kept = [record for record in self.records() if record["step"] <= step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(self.path, text.encode())
