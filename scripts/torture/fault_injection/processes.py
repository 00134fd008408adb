"""chargpt as a process of its own, with faults in its file layer: what is harmed.

The process is forked from one that has imported everything and computed nothing, so that a case
costs a fraction of a second. The code under test is the code that ships: only `os` and `open` are
others, and what `RunFolder.save` returns is noted outside of the run.
"""

import builtins
import contextlib
import io
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chargpt.cli.main as command_line
import chargpt.training.trainer  # noqa: F401  imported once, here, and not by every fork
from chargpt.store.run import RunFolder

WRITES = ("open", "write", "fsync", "rename", "replace", "mkdir")
DELETES = ("unlink", "rmdir")


@dataclass(frozen=True)
class Fault:
    """The `number`th file operation under a folder kills the process, or fails with an errno.

    Attributes:
        under: the folder; what happens elsewhere is not counted.
        number: of the operation, from 1.
        errno: what it fails with; None is a kill -9.
        for_ever: every later write fails too. Deleting goes on working, as on a full disk.
    """

    under: Path
    number: int
    errno: int | None = None
    for_ever: bool = False


@dataclass
class Ended:
    """How a process ended: its exit code (negative: the signal that killed it) and its words."""

    code: int
    out: str
    err: str
    seconds: float  # from the signal that was sent, or from its start, to its end


class FaultyFiles:
    """Counts file operations, and lets one fail."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.count = 0
        self.under = str(fault.under.absolute())

    def strike(self, name: str, path: object) -> None:
        """Count an operation on a path (or a descriptor), and fail if it is the one."""
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return
        if not os.path.abspath(os.fsdecode(path)).startswith(self.under):  # type: ignore[arg-type]
            return
        self.count += 1
        again = self.fault.for_ever and self.count > self.fault.number and name in WRITES
        if self.count != self.fault.number and not again:
            return
        if self.fault.errno is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise OSError(self.fault.errno, os.strerror(self.fault.errno), str(path))

    def install(self) -> None:
        """Put failing operations in the place of those of `os` and `open`."""
        for name in (*WRITES, *DELETES):
            if hasattr(os, name) and name not in ("open", "write"):
                setattr(os, name, self._struck(name, getattr(os, name)))
        plain = builtins.open
        faults = self

        def opened(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if not any(letter in mode for letter in "wax+"):
                return plain(file, mode, *rest, **named)
            faults.strike("open", file)
            return _Torn(plain(file, mode, *rest, **named), file, faults)

        builtins.open = opened  # type: ignore[assignment]
        io.open = opened  # type: ignore[assignment]

    def _struck(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(path: Any, *rest: Any, **named: Any) -> Any:
            folder = named.get("dir_fd")
            self.strike(name, path if folder is None else folder)
            return real(path, *rest, **named)

        return operation


class _Torn:
    """A file whose failing write leaves half of what was to be written."""

    def __init__(self, file: Any, path: Any, faults: FaultyFiles) -> None:
        self.file, self.path, self.faults = file, path, faults

    def write(self, content: Any) -> int:
        half = content[: len(content) // 2]
        try:
            self.faults.strike("write", self.path)
        except OSError:
            self.file.write(half)
            raise
        return int(self.file.write(content))

    def __enter__(self) -> "_Torn":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def run_forked(
    words: list[str],
    folder: Path,
    *,
    fault: Fault | None = None,
    acknowledged: Path | None = None,
    stdin: bytes = b"",
    during: Callable[[int], None] | None = None,
    seconds: float = 60.0,
) -> Ended:
    """Run `chargpt WORDS` in a fork of this process.

    Args:
        words: of the command line.
        folder: that it runs in.
        fault: in its file layer.
        acknowledged: a file that gets a line for each step whose save has returned.
        stdin: what it can read.
        during: called with the process's number once it runs; may send signals.
        seconds: after which it is killed, and counts as hanging (code -9, words say so).
    """
    process = Forked(words, folder, fault=fault, acknowledged=acknowledged, stdin=stdin)
    if during is not None:
        during(process.number)
        process.start = time.monotonic()
    return process.wait(seconds)


def run_ranks(
    words: list[str],
    folder: Path,
    ranks: int = 2,
    *,
    acknowledged: Path | None = None,
    during: Callable[[list[int]], None] | None = None,
    seconds: float = 60.0,
) -> list[Ended]:
    """Run `chargpt WORDS` in forks that train together, as those do that `torchrun` starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        Forked(
            words,
            folder,
            acknowledged=acknowledged if rank == 0 else None,
            environment={**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    if during is not None:
        during([process.number for process in processes])
    for process in processes:
        process.start = time.monotonic()
    return [process.wait(seconds) for process in processes]


class Forked:
    """`chargpt WORDS` in a fork of this process."""

    def __init__(
        self,
        words: list[str],
        folder: Path,
        *,
        fault: Fault | None = None,
        acknowledged: Path | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        rank = (environment or {}).get("RANK", "")
        given, self.out, self.err = (
            folder / f".{name}{rank}" for name in ("stdin", "stdout", "stderr")
        )
        given.write_bytes(stdin)
        for path in (self.out, self.err):
            path.write_text("")
        self.number = os.fork()
        if self.number == 0:
            os.environ.update(environment or {})
            _be_chargpt(words, folder, fault, acknowledged, [given, self.out, self.err])
        self.start = time.monotonic()

    def wait(self, seconds: float) -> Ended:
        """Wait for its end, at most so long, and then kill it."""
        while True:
            done, status = os.waitpid(self.number, os.WNOHANG)
            if done:
                break
            if time.monotonic() - self.start > seconds:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.number, signal.SIGKILL)  # it leads a group of its own
                self.err.write_text(f"still running after {seconds} s")
                _, status = os.waitpid(self.number, 0)
                break
            time.sleep(0.002)
        return Ended(
            os.waitstatus_to_exitcode(status),
            self.out.read_text(errors="replace"),
            self.err.read_text(errors="replace"),
            time.monotonic() - self.start,
        )


def _be_chargpt(
    words: list[str],
    folder: Path,
    fault: Fault | None,
    acknowledged: Path | None,
    streams: list[Path],
) -> None:
    """Become `chargpt WORDS`; never return."""
    code = 70
    try:
        flags = (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)
        for number, path in enumerate(streams):
            os.dup2(os.open(path, flags[number]), number)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, encoding="utf-8", closefd=False)
            for number, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        os.setsid()
        os.chdir(folder)
        if acknowledged is not None:
            _acknowledge_saves(acknowledged)
        if fault is not None:
            FaultyFiles(fault).install()
        sys.argv = ["chargpt", *words]
        command_line.run()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _acknowledge_saves(path: Path) -> None:
    real = RunFolder.save
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def save(self: RunFolder, **what: Any) -> Path:
        folder = real(self, **what)
        os.write(descriptor, f"{what['state']['step']}\n".encode())
        return folder

    RunFolder.save = save  # type: ignore[method-assign]
