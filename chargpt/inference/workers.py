"""Many streams on a CPU, shared out among processes, one a core.

Python, and all of numpy but its matrix products, keep to one core. A stream's text does not depend
on who draws it (drawing.py), so each process draws its share of the streams from the first
character to the last, and nothing has to be agreed on while they do. Torch is not imported here:
a process is ready after a tenth of a second.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NoReturn, Self

import numpy as np

from chargpt.config import SampleConfig
from chargpt.errors import WorkError
from chargpt.inference.drawing import Floats, Ids, drawn
from chargpt.inference.numpy_decoder import Array, NumpyDecoder, Weights

WORTH = 2e10  # multiplications that a process is started for: about a second of one core
LARGEST = 16_000_000  # parameters, since each process has its own
MOST = 64  # processes
ONE_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
ID = np.dtype("<u4")
ALONE = "set OMP_NUM_THREADS=1 to draw all in one process"
FAILED = 33  # exit code of a process whose last words are an error for the user


@dataclass(frozen=True)
class Job:
    """What every process is told.

    Attributes:
        weights: of the model.
        keys: of the characters that every stream holds, (L, H, T, D).
        values: likewise.
        logits: of the first characters, (V,).
        options: whose `seed` is set.
        unknown_id: the token that is never drawn.
    """

    weights: Weights
    keys: Array
    values: Array
    logits: Floats
    options: SampleConfig
    unknown_id: int | None

    def pack(self) -> bytes:
        """Return it as bytes, arrays and JSON alone."""
        content = io.BytesIO()
        # a prompt has been read, and stop strings are looked for, by the one who asks
        options = self.options.model_dump_json(exclude={"prompt", "stop"})
        facts = {"options": options, "unknown_id": self.unknown_id}
        np.savez(
            content,
            allow_pickle=False,
            facts=np.array(json.dumps(facts)),
            **{name: getattr(self, name) for name in ("keys", "values", "logits")},
            **vars(self.weights),
        )
        return content.getvalue()

    @classmethod
    def unpack(cls, content: bytes) -> "Job":
        """Return what `pack` was called on, but for the prompt and the stop strings."""
        arrays = dict(np.load(io.BytesIO(content), allow_pickle=False))
        facts = json.loads(str(arrays.pop("facts")))
        keys, values, logits = (arrays.pop(name) for name in ("keys", "values", "logits"))
        options = SampleConfig.model_validate_json(facts["options"])
        return cls(Weights(**arrays), keys, values, logits, options, facts["unknown_id"])

    def draw(self, streams: Sequence[int]) -> Iterator[Ids]:
        """Yield a character of each of these streams, (N,), `options.length` times."""
        decoder = NumpyDecoder(self.weights, len(streams))
        decoder.remember(self.keys, self.values)
        return drawn(decoder, self.logits, self.options, streams, self.unknown_id)


def processes_for(parameters: int, streams: int, length: int, cores: int) -> int:
    """Return how many processes are done the soonest; 1 means this one."""
    if parameters > LARGEST:
        return 1
    work = parameters * streams * length
    return max(1, min(cores, streams, MOST, int(work / WORTH)))


def drawn_by_workers(job: Job, streams: Sequence[int], processes: int) -> Iterator[Ids]:
    """Yield what `job.draw(streams)` does, from so many processes.

    Raises:
        WorkError: the model's weights give numbers that are not finite, or a process could not be
            started or was lost.
    """
    parts = [part.tolist() for part in np.array_split(np.asarray(streams), processes)]
    with ExitStack() as stack:
        workers = [stack.enter_context(_Worker(part)) for part in parts]
        content = job.pack()
        for worker in workers:
            worker.send(content)
        for _ in range(job.options.length):
            yield np.concatenate([worker.receive() for worker in workers])


class _Worker:
    """A process that draws some of the streams, and ends with the `with` block at the latest."""

    def __init__(self, streams: list[int]) -> None:
        self.bytes = ID.itemsize * len(streams)  # of a character of each
        # a pipe that nobody reads would fill up
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (`__exit__` closes it)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, json.dumps(streams)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # a Ctrl-C is for this process, which then ends it
            )
        except OSError as error:
            self.errors.close()
            raise WorkError(
                f"no further process could be started to draw samples ({error.strerror}); {ALONE}"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with self.process, self.errors:  # close all, and wait
            pass

    def send(self, content: bytes) -> None:
        """Tell the process what to do."""
        assert self.process.stdin is not None
        try:
            with self.process.stdin as to_process:
                to_process.write(content)
        except OSError:  # it reads no more
            self.lost()

    def receive(self) -> Ids:
        """Return the next character of each of its streams, (N,)."""
        assert self.process.stdout is not None
        content = self.process.stdout.read(self.bytes)
        if len(content) < self.bytes:
            self.lost()
        return np.frombuffer(content, ID).astype(np.int64)

    def lost(self) -> NoReturn:
        """Raise the error that the process ended with."""
        code = self.process.wait()
        self.errors.seek(0)
        words = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
        if code == FAILED:
            raise WorkError(*words)
        said = "".join(f", {line}" for line in words)
        raise WorkError(
            f"a process that drew some of the samples was lost (exit code {code}{said}); {ALONE}"
        )


def main() -> None:
    """Draw the streams that the first argument names; ids go to standard output as they come."""
    job = Job.unpack(sys.stdin.buffer.read())
    out = sys.stdout.buffer
    try:
        for ids in job.draw(json.loads(sys.argv[1])):
            out.write(ids.astype(ID).tobytes())
            out.flush()
    except WorkError as error:
        sys.stderr.write(str(error))
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
