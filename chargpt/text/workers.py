"""Processes that prepare a long text, and the journal of what they have done.

A process reads its tasks from standard input, so it ends with the process that prepares the text,
also if that is killed. It does not import the user's program, as those of `multiprocessing` do.
"""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from chargpt.config import TextConfig
from chargpt.errors import OperationError, TextError, reason_of
from chargpt.files import read_regular
from chargpt.text.prepare import JOURNAL, MAX_META_BYTES, PASSES, delete_text_files
from chargpt.text.source import SEGMENT_BYTES, Segment, Stretch

MAX_PROCESSES = 16  # more wait for the disk
PROGRESS_SECONDS = 0.1
MAX_CACHED = 0.25  # fraction of the memory: a longer text does not stay in the page cache
Process = subprocess.Popen[str]
READ_SETTINGS = {"encoding", "encoding_errors", "newlines", "documents"}  # for `text_pieces`


class Workers:
    """Processes that run both passes over the segments of a text.

    Every result is written to a journal in the folder of the prepared text. If an attempt that was
    killed has left one there, of the same `facts`, its results are in `known`; else what it has
    left is deleted.
    """

    def __init__(self, folder: Path, facts: object) -> None:
        self.journal, self.known = folder / JOURNAL, dict[tuple[str, int], Any]()
        key, lines = hashlib.sha256(json.dumps(facts).encode()).hexdigest(), [""]
        with suppress(OSError, ValueError):
            lines = read_regular(self.journal, MAX_META_BYTES).decode("ascii").split("\n")
        if lines[0] == key:
            lines = [line for line in lines[1:] if line == _line(line[9:])]
            entries = (json.loads(line[9:]) for line in lines)
            self.known = {(stage, number): result for stage, number, result in entries}
        else:
            lines = []
            delete_text_files(folder)
        self.journal.write_text("\n".join([key, *lines, ""]), encoding="ascii")
        self.processes = list[Process]()

    def __enter__(self) -> Self:
        """Start the processes, one for each core."""
        path, pipe = [*map(str, sys.path)], subprocess.PIPE
        program = f"import sys; sys.path = {path}; from chargpt.text.workers import serve; serve()"
        for _ in range(min(os.cpu_count() or 1, MAX_PROCESSES)):
            words = [sys.executable, "-c", program]
            process = subprocess.Popen(  # a group of its own has no Ctrl-C
                words, stdin=pipe, stdout=pipe, encoding="ascii", process_group=0
            )
            self.processes.append(process)
        return self

    def __exit__(self, *error: object) -> None:
        """Kill the processes, whatever they do."""
        for process in self.processes:
            process.kill()
            with suppress(BrokenPipeError), process:  # closes its pipes and waits for it
                pass

    def run(
        self,
        stage: str,
        segments: Sequence[Segment],
        settings: TextConfig,
        arguments: Sequence[Sequence[Any]],
        report: Callable[[int], object],
    ) -> list[list[Any]]:
        """Return what the function of a pass, `PASSES[stage]`, returns for each segment.

        `arguments` are further ones of the function; `report` is called with the number of bytes
        read so far, as stored.

        Raises:
            TextError: as the function raises it.
            OSError: a file cannot be read or written.
            OperationError: a process was killed.
        """
        fields = settings.model_dump(mode="json", include=READ_SETTINGS)
        n_read, results = [0] * len(segments), list[list[Any]]()
        idle = SimpleQueue[Process]()
        for process in self.processes:
            idle.put(process)

        def call(number: int) -> list[Any]:
            known = self.known.get((stage, number))
            task = [stage, segments[number][:3], fields, known, arguments[number]]
            process = idle.get()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(task) + "\n")
                process.stdin.flush()
                for line in process.stdout:
                    answer = json.loads(line)
                    if isinstance(answer, list):
                        return answer
                    if isinstance(answer, dict):
                        error = answer["error"]
                        raise TextError(error) if isinstance(error, str) else OSError(*error)
                    n_read[number] = answer
            except BrokenPipeError:
                pass
            finally:
                idle.put(process)
            raise OperationError(
                "a process that read the text was killed, perhaps for want of memory; close other "
                "programs and start again"
            )

        is_cached = SEGMENT_BYTES * len(segments) <= MAX_CACHED * _memory()
        with ThreadPoolExecutor(len(self.processes)) as pool:
            futures = [pool.submit(call, number) for number in range(len(segments))]
            try:
                for number, future in enumerate(futures):
                    while not future.done():
                        with suppress(TimeoutError):
                            future.exception(PROGRESS_SECONDS)
                        report(sum(n_read))
                    results.append(future.result())
                    if stage == "encoding" and not is_cached:
                        _drop_from_cache(segments[number])
                    n_read[number] = results[-1][0]
                    if results[-1] != self.known.get((stage, number)):
                        with open(self.journal, "a", encoding="ascii") as file:
                            file.write(_line(json.dumps([stage, number, results[-1]])) + "\n")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in self.processes:  # so that the threads that read their answers end
                    process.kill()
                raise
        return results


def _line(entry: str) -> str:
    """Return an entry of the journal with its CRC-32, since a kill or the disk may damage it."""
    return f"{zlib.crc32(entry.encode()):08x} {entry}"


def _memory() -> float:
    """Return the memory of the machine in bytes; infinity where pages cannot be dropped."""
    if not hasattr(os, "posix_fadvise"):
        return math.inf
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _drop_from_cache(segment: Segment) -> None:
    """Free the pages of a segment of a very long text, which no pass reads any more.

    Linux is slow to find others for the tokens: without it encoding takes two to three times as
    long (benchmarks/LOG.md).
    """
    for path, begin, end in segment.stretches:
        with suppress(OSError), open(path, "rb") as file:
            size = end - begin if end else 0  # 0: to its end
            os.posix_fadvise(file.fileno(), begin, size, os.POSIX_FADV_DONTNEED)


def serve() -> None:
    """Do the tasks of `Workers.run`, a line of JSON each, and write the answers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Windows: after Ctrl-C the other end kills it
    sent = 0.0

    def send(answer: object) -> None:
        nonlocal sent
        sent = time.monotonic()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    for line in sys.stdin:
        stage, (split, stretches, is_last), fields, known, arguments = json.loads(line)
        segment = Segment(split, [Stretch(*each) for each in stretches], is_last)
        settings = TextConfig.model_construct(**fields)
        try:
            for item in PASSES[stage](segment, settings, known, *arguments):
                if not isinstance(item, int) or time.monotonic() > sent + PROGRESS_SECONDS:
                    send(item)
        except TextError as error:
            send({"error": str(error)})
        except BrokenPipeError:  # the other end was killed
            os._exit(1)
        except OSError as error:
            send({"error": [error.errno, reason_of(error)]})
