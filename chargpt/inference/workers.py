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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from chargpt.config import SampleConfig
from chargpt.errors import WorkError
from chargpt.inference.drawing import Floats, Ids, drawn
from chargpt.inference.numpy_decoder import Array, NumpyDecoder, Weights

WORTH = 2e10  # multiplications: about a second of one core
LARGEST = 64_000_000  # bytes of weights, since each process has its own
ONE_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
ID = np.dtype("<u4")
ALONE = "set OMP_NUM_THREADS=1 to draw all in one process"
FAILED = 3  # exit code of a process whose last words are an error for the user


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
        facts = {"options": self.options.model_dump_json(), "unknown_id": self.unknown_id}
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
        """Return what `pack` was called on."""
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


def is_worth_sharing(weights: Weights, streams: int, length: int) -> bool:
    """Return whether several processes would be done sooner than one."""
    numbers = weights.nbytes / 4
    return streams > 1 and numbers * streams * length > WORTH and weights.nbytes <= LARGEST


def drawn_by_workers(job: Job, streams: Sequence[int], processes: int) -> Iterator[Ids]:
    """Yield what `job.draw(streams)` does, from so many processes.

    Raises:
        WorkError: the model's weights give numbers that are not finite, or a process was lost.
    """
    parts = [part.tolist() for part in np.array_split(np.asarray(streams), processes)]
    parts = [part for part in parts if part]
    with ExitStack() as stack:
        workers = []
        for part in parts:
            workers.append(stack.enter_context(_start(part)))
            stack.callback(workers[-1].kill)
        content = job.pack()
        for worker in workers:
            _send(worker, content)
        for _ in range(job.options.length):
            taken = [_receive(*each) for each in zip(workers, parts, strict=True)]
            yield np.concatenate(taken)


def _start(streams: list[int]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, json.dumps(streams)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # a Ctrl-C is for this process, which then ends them
        )
    except OSError as error:
        raise WorkError(
            f"no further process could be started to draw samples ({error.strerror}); {ALONE}"
        ) from None


def _send(worker: "subprocess.Popen[bytes]", content: bytes) -> None:
    assert worker.stdin is not None
    try:
        with worker.stdin as to_worker:
            to_worker.write(content)
    except OSError:  # it reads no more
        _lost(worker)


def _receive(worker: "subprocess.Popen[bytes]", streams: list[int]) -> Ids:
    """Return the next character of each of a worker's streams, (N,)."""
    assert worker.stdout is not None
    size = ID.itemsize * len(streams)
    content = worker.stdout.read(size)
    if len(content) < size:
        _lost(worker)
    return np.frombuffer(content, ID).astype(np.int64)


def _lost(worker: "subprocess.Popen[bytes]") -> NoReturn:
    """Raise the error that a worker ended with."""
    assert worker.stderr is not None
    words = worker.stderr.read().decode(errors="replace")
    if worker.wait() == FAILED:
        raise WorkError(words.splitlines()[-1])  # before it there may be warnings of numpy
    raise WorkError(
        f"a process that drew some of the samples was lost (exit code {worker.returncode}), "
        f"perhaps for want of memory; {ALONE}"
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
