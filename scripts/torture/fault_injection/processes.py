"""Run chargpt in a forked process with fault injection in `os` and `open`.

The parent has imported everything and computed nothing, so a case takes a fraction of a second.
The code under test is unchanged: only `os` and `open` are replaced, and `RunFolder.save` also logs
each completed save outside of the run.
"""

import builtins
import contextlib
import io
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chargpt.cli.main as command_line
import chargpt.training.trainer  # noqa: F401  imported once, before forking
from chargpt.store.folder import RunFolder

WRITES = ("open", "write", "fsync", "rename", "replace", "mkdir")
DELETES = ("unlink", "rmdir")
READS = ("stat", "lstat", "listdir", "scandir", "open to read")


@dataclass(frozen=True)
class Fault:
    """A fault at the `number`th file operation under a folder: SIGKILL, or an OSError.

    Attributes:
        under: the folder; operations elsewhere are not counted.
        number: index of the operation, from 1.
        errno: error code of the failure; None sends SIGKILL.
        persistent: whether all later writes fail too. Deleting still works, as on a full disk.
        reads: count only what reads files, lists folders or asks for their status.
    """

    under: Path
    number: int
    errno: int | None = None
    persistent: bool = False
    reads: bool = False


@dataclass
class ProcessResult:
    """Exit code (negative: the signal that killed it) and output of a process."""

    code: int
    out: str
    err: str
    seconds: float  # from `while_running` (or from the start) to the exit


class FaultyFiles:
    """Count file operations and make one of them fail."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.count = 0
        self.under = str(fault.under.absolute())

    def maybe_fail(self, name: str, path: object) -> None:
        """Count an operation on a path (or file descriptor) and fail if it is the faulty one."""
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return
        if not os.path.abspath(os.fsdecode(path)).startswith(self.under):  # type: ignore[arg-type]
            return
        self.count += 1
        repeated = self.fault.persistent and self.count > self.fault.number and name in WRITES
        if self.count != self.fault.number and not repeated:
            return
        if self.fault.errno is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise OSError(self.fault.errno, os.strerror(self.fault.errno), str(path))

    def install(self) -> None:
        """Replace the functions of `os` and `open` by counting ones."""
        reads = self.fault.reads
        for name in READS if reads else (*WRITES, *DELETES):
            if hasattr(os, name) and name not in ("open", "write"):
                setattr(os, name, self._wrap(name, getattr(os, name)))
        real_open = builtins.open
        faults = self

        def faulty_open(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if not any(letter in mode for letter in "wax+"):
                if reads:
                    faults.maybe_fail("open to read", file)
                return real_open(file, mode, *rest, **named)
            if reads:
                return real_open(file, mode, *rest, **named)
            faults.maybe_fail("open", file)
            return _TruncatingFile(real_open(file, mode, *rest, **named), file, faults)

        builtins.open = faulty_open  # type: ignore[assignment]
        io.open = faulty_open  # type: ignore[assignment]

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(path: Any, *rest: Any, **named: Any) -> Any:
            folder = named.get("dir_fd")
            self.maybe_fail(name, path if folder is None else folder)
            return real(path, *rest, **named)

        return operation


class _TruncatingFile:
    """A file whose failing write writes half of the content first."""

    def __init__(self, file: Any, path: Any, faults: FaultyFiles) -> None:
        self.file, self.path, self.faults = file, path, faults

    def write(self, content: Any) -> int:
        half = content[: len(content) // 2]
        try:
            self.faults.maybe_fail("write", self.path)
        except OSError:
            self.file.write(half)
            raise
        return int(self.file.write(content))

    def __enter__(self) -> "_TruncatingFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def run_forked(
    arguments: list[str],
    folder: Path,
    *,
    fault: Fault | None = None,
    save_log: Path | None = None,
    stdin: bytes = b"",
    while_running: Callable[[int], None] | None = None,
    seconds: float = 60.0,
) -> ProcessResult:
    """Run `chargpt ARGUMENTS` in a fork of this process and wait for it.

    Args:
        arguments: the command line.
        folder: the working directory.
        fault: the file operation that fails.
        save_log: file to which each completed save appends its step.
        stdin: content of standard input.
        while_running: called with the process id after the start; may send signals.
        seconds: timeout after which the process is killed (code -9).
    """
    process = ForkedProcess(arguments, folder, fault=fault, save_log=save_log, stdin=stdin)
    if while_running is not None:
        while_running(process.pid)
        process.start = time.monotonic()
    return process.wait(seconds)


def run_ranks(
    arguments: list[str],
    folder: Path,
    ranks: int = 2,
    *,
    save_log: Path | None = None,
    while_running: Callable[[list[int]], None] | None = None,
    seconds: float = 60.0,
) -> list[ProcessResult]:
    """Run `chargpt ARGUMENTS` as one process group of forks, as `torchrun` would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        ForkedProcess(
            arguments,
            folder,
            save_log=save_log if rank == 0 else None,
            environment={**rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    if while_running is not None:
        while_running([process.pid for process in processes])
    for process in processes:
        process.start = time.monotonic()
    return [process.wait(seconds) for process in processes]


class ForkedProcess:
    """A fork of this process that runs `chargpt ARGUMENTS`."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        *,
        fault: Fault | None = None,
        save_log: Path | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        rank = (environment or {}).get("RANK", "")
        stdin_path, self.out, self.err = (
            folder / f".{name}{rank}" for name in ("stdin", "stdout", "stderr")
        )
        stdin_path.write_bytes(stdin)
        for path in (self.out, self.err):
            path.write_text("")
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(environment or {})
            _exec_chargpt(arguments, folder, fault, save_log, [stdin_path, self.out, self.err])
        self.start = time.monotonic()

    def wait(self, seconds: float) -> ProcessResult:
        """Wait for the process to exit; kill it after `seconds`."""
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() - self.start > seconds:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)  # it leads its own process group
                self.err.write_text(f"still running after {seconds} s")
                _, status = os.waitpid(self.pid, 0)
                break
            time.sleep(0.002)
        return ProcessResult(
            os.waitstatus_to_exitcode(status),
            self.out.read_text(errors="replace"),
            self.err.read_text(errors="replace"),
            time.monotonic() - self.start,
        )


def _exec_chargpt(
    arguments: list[str],
    folder: Path,
    fault: Fault | None,
    save_log: Path | None,
    streams: list[Path],
) -> None:
    """Run `chargpt ARGUMENTS` in this process and exit."""
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
        tempfile.tempdir = str(folder)
        if save_log is not None:
            _log_saves(save_log)
        if fault is not None:
            FaultyFiles(fault).install()
        sys.argv = ["chargpt", *arguments]
        command_line.run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _log_saves(path: Path) -> None:
    real = RunFolder.save
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def save(self: RunFolder, **contents: Any) -> Path:
        folder = real(self, **contents)
        if not self.path.is_absolute():  # as the copy of a run after a failed last save is
            os.write(descriptor, f"{contents['state'].step}\n".encode())
        return folder

    RunFolder.save = save  # type: ignore[method-assign]
