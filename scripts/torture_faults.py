"""chargpt as a process of its own, with faults in its file layer: what `torture.py` runs.

The process is forked from one that has imported everything and computed nothing, so that a case
costs a fraction of a second. The code under test is the code that ships: only `os` and `open` are
others, and what `RunFolder.save` returns is noted outside of the run.
"""

import builtins
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chargpt.cli.main as command_line
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
    out, err, given = (folder / f".{name}" for name in ("stdout", "stderr", "stdin"))
    given.write_bytes(stdin)
    number = os.fork()
    if number == 0:
        _be_chargpt(words, folder, fault, acknowledged, (given, out, err))
    start = time.monotonic()
    if during is not None:
        during(number)
        start = time.monotonic()
    while True:
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            break
        if time.monotonic() - start > seconds:
            os.kill(number, signal.SIGKILL)
            err.write_text(f"still running after {seconds} s")
            _, status = os.waitpid(number, 0)
            break
        time.sleep(0.002)
    return Ended(
        os.waitstatus_to_exitcode(status),
        out.read_text(errors="replace"),
        err.read_text(errors="replace"),
        time.monotonic() - start,
    )


def _be_chargpt(
    words: list[str],
    folder: Path,
    fault: Fault | None,
    acknowledged: Path | None,
    streams: tuple[Path, Path, Path],
) -> None:
    """Become `chargpt WORDS`; never return."""
    code = 70
    try:
        for number, (path, flags) in enumerate(
            zip(streams, (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT | os.O_TRUNC] * 2), strict=True)
        ):
            os.dup2(os.open(path, flags, 0o600), number)
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
