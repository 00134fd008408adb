"""Atomic, durable writing of files, and bounded reading, also of JSON and YAML.

YAML is read strictly: repeated keys and aliases are rejected; `1e-4` is a number; dates and base-60
numbers remain text.
"""

import errno
import json
import os
import re
import secrets
import shlex
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import IO, Any

import yaml

from chargpt.errors import ConfigError, RunError, UnreadableError, reason_of

Buffers = Sequence[bytes | memoryview]  # the content of a file, in parts
UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK}  # by a network file system
IS_WINDOWS = os.name == "nt"  # which moves and deletes no open or mapped file
INVALID_NAME = 123  # Windows' error for a path that cannot exist, such as a pattern
MAX_YAML_CHARACTERS = 200_000  # the parser takes seconds for a megabyte
MAX_NUMBER_CHARACTERS = 100  # of YAML
MAX_KEY_CHARACTERS = 200  # of a key of YAML, with those of its sections
MAX_JSON_MARKS = 10_000_000  # of which the metadata of a text in a million files has 8 million
UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\udc80-\udcff]")  # in a shell's word


def exists(path: Path) -> bool:
    """Return whether there is anything at a path, a dangling link included.

    It raises OSError if the system cannot tell, which `Path.exists` of some versions takes for no.
    """
    with suppress_missing():
        path.lstat()
        return True
    return False


def expand_user(path: str) -> Path:
    """Return a path with a leading `~` replaced, or as it is if no system can have it."""
    with suppress(ValueError):
        path = os.path.expanduser(path)
    return Path(path)


def is_missing(error: Exception) -> bool:
    """Return whether an error says that there is nothing at a path."""
    is_invalid_name = getattr(error, "winerror", None) == INVALID_NAME
    return is_invalid_name or isinstance(error, FileNotFoundError | NotADirectoryError)


@contextmanager
def suppress_missing() -> Iterator[None]:
    """Suppress in the block the error that there is nothing at a path, or that none can be."""
    try:
        yield
    except (OSError, ValueError) as error:  # a ValueError: no system has such a path
        if isinstance(error, OSError) and not is_missing(error):
            raise


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Replace errors of reading a file of a run in the block.

    Raises:
        UnreadableError: the system cannot read it now.
        RunError: it is missing or damaged.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        problem = f"{path} cannot be read ({reason_of(error)})"
        if isinstance(error, OSError) and not is_missing(error):
            remedy = "try again, and if that does not help, check the disk and the permissions"
            raise UnreadableError(f"{problem}; {remedy}") from None
        raise RunError(f"{problem}; restore it or use another checkpoint") from None


def entry_names(folder: Path) -> list[str]:
    """Return the names of a folder's entries; none if there is no folder."""
    with suppress_missing():
        return os.listdir(folder)
    return []


def path_of(descriptor: int) -> Path:
    """Return the present path of an open folder, relative to the working directory if beneath it.

    It raises OSError if the folder is deleted, or the system cannot tell.
    """
    if sys.platform == "darwin":
        import fcntl

        found = os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    else:
        found = os.readlink(f"/proc/self/fd/{descriptor}")
    path = Path(found)
    if not os.path.samestat(path.stat(), os.fstat(descriptor)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), found)
    with suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return path


def lock_descriptor(descriptor: int) -> None:
    """Lock an open folder until it is closed, if the file system can.

    Raises:
        BlockingIOError: another process has locked it.
    """
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # NFS locks only what is open for writing, as no folder is
            if isinstance(error, BlockingIOError):
                raise


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file and flush it to disk (fsync)."""
    with open(path, "wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())


def in_background(work: Callable[[], object], delay: float = 0.0) -> Future[None]:
    """Return the future of work that a daemon thread does after a delay in seconds."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)

    timer = Timer(delay, run)
    timer.daemon = True
    timer.start()
    return done


def sync_files(folder: Path, names: Iterable[str]) -> Future[None]:
    """Flush files of a folder to disk, and its entries; return the future of that.

    The files are open when it returns, so that the folder may be renamed.
    """
    with ExitStack() as stack:  # Windows cannot flush a file that is open for reading only
        files = [stack.enter_context(open(folder / name, "r+b", buffering=0)) for name in names]
        opened = stack.pop_all()
    sync_directory(folder)

    def flush() -> None:
        with opened:
            for file in files:
                os.fsync(file.fileno())

    return in_background(flush)


def sync_directory(folder: Path) -> None:
    """Flush a directory's entries to disk, so that renames in it survive a power cut."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def write_atomically(
    path: Path, content: bytes | Iterable[bytes], *, force: bool | None = True
) -> None:
    """Write a file: readers see the old content, if any, or the new, never a part.

    A file that is replaced keeps its mode and, if root writes it, its owner. Without `force`
    nothing is replaced, as in `place`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        write_synced(temporary, [content] if isinstance(content, bytes) else content)
        with suppress(OSError, AttributeError):  # there is none, only root may, or Windows has none
            status = path.stat()
            os.chmod(temporary, stat.S_IMODE(status.st_mode))
            os.chown(temporary, status.st_uid, status.st_gid)
        place(temporary, path, force=force)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def place(temporary: Path, path: Path, *, force: bool | None = None) -> None:
    """Give a finished file or folder its name; without `force`, only if nothing has that name.

    The temporary name may remain, for the caller to delete.

    Raises:
        ConfigError: something has the name, as `require_new` says.
        OSError: it cannot be written.
    """
    try:
        if force:
            os.replace(temporary, path)
        elif IS_WINDOWS:  # where a rename replaces nothing
            os.rename(temporary, path)
        elif temporary.is_dir():
            path.mkdir()
            os.rename(temporary, path)  # replaces an empty folder
        else:
            try:
                os.link(temporary, path)
            except OSError:  # no links, or the name is in use, as the next line then says
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # reserves the name
                os.replace(temporary, path)
    except FileExistsError:
        raise taken(path, force) from None


def require_new(path: Path, *, force: bool | None = None) -> None:
    """Check that nothing is at a path, or with `force` at most a regular file, else ConfigError.

    `force` is None where the command has no such option.
    """
    if not exists(path):
        return
    if force and path.is_file() and not path.is_symlink():
        return
    raise taken(path, force)


def taken(path: Path, force: bool | None) -> ConfigError:
    """Return the error that something is at a path, with the remedy of `require_new`."""
    remedy = "replace it with --force" if force is False else "delete it"
    return ConfigError(f"{path} exists; {remedy}, or name another")


def name_pattern(names: Iterable[str]) -> str:
    """Return a pattern of file names, and of what a killed `write_atomically` of one leaves."""
    either = "|".join(map(re.escape, names))
    return rf"({either}|\.({either})\.[0-9a-f]{{12}}\.tmp)"


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Links, pipes and devices are rejected unopened.

    It raises ValueError for these and for files larger than `max_bytes`, else OSError.
    """
    with open_regular(path, max_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)  # that of /proc/kmsg is 0, without an end


def open_regular(path: Path, max_bytes: int) -> IO[bytes]:
    """Open a regular file to read; `read_regular` says what is rejected."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > max_bytes:
        raise ValueError(f"it is larger than {max_bytes:,} bytes")
    no_follow = getattr(os, "O_NOFOLLOW", 0)  # Windows has none
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | no_follow))


def quoted(word: object) -> str:
    """Return a word of a command to copy, quoted for the shell of this system.

    Control characters and bytes that are no Unicode are written as bash and zsh read them.
    """
    if not IS_WINDOWS and not UNPRINTABLE.search(str(word)):
        return shlex.quote(str(word))
    if not IS_WINDOWS:
        escaped = re.sub(r"[\\']", r"\\\g<0>", str(word))
        return f"$'{UNPRINTABLE.sub(_in_hexadecimal, escaped)}'"
    return str(word) if re.fullmatch(r"[\w@%+=:,./\\-]+", str(word)) else f'"{word}"'


def _in_hexadecimal(found: re.Match[str]) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(found[0]))


def parse_json(content: bytes | str) -> dict[str, Any]:
    """Return a JSON object; ValueError if it is none, too large in memory, or nested too deep."""
    if isinstance(content, str):
        content = content.encode(errors="surrogatepass")
    # a list or an object takes up to 200 bytes of memory, another value up to 80
    if 4 * (content.count(b"[") + content.count(b"{")) + content.count(b",") > MAX_JSON_MARKS:
        raise ValueError("it has too many values")
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file, with the errors of `read_regular` and `parse_json`."""
    return parse_json(read_regular(path, max_bytes))


def to_json(value: object) -> bytes:
    """Return indented JSON with sorted keys, so that equal values give equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _fault(problem: str, where: Any) -> yaml.MarkedYAMLError:
    """Return an error at a node or an event."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)


class _Loader(yaml.SafeLoader):
    """Loader that reads `1e-4` as a number and rejects aliases."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise _fault("an alias (*name) is not allowed", self.peek_event())  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Dumper for `_Loader`: it quotes text that would be read as a number, such as `1e5`."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # only double quotes preserve line breaks such as U+0085
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def parse_yaml(
    source: str, origin: str, remedy: str = "correct it"
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a YAML mapping as a dict, and the line of each dotted key.

    Invalid YAML is reported with its `origin` and `remedy`, and with its line if it has several.

    Raises:
        ConfigError: the text is not a YAML mapping, or repeats a key.
    """
    if len(source) > MAX_YAML_CHARACTERS:
        raise ConfigError(
            f"{origin} is over {MAX_YAML_CHARACTERS:,} characters, the maximum of a config; name "
            "another file"
        )
    lines: dict[str, int] = {}
    try:
        loader = _Loader(source)
        node = loader.get_single_node()
        value = {} if node is None else _to_python(loader, node, "", lines)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # the last four: values that do not match their tag, or are nested too deep
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark and "\n" in source else ""
        problem = getattr(error, "problem", None) or (str(error) or "empty").splitlines()[0]
        raise ConfigError(f"{origin}{where} is not valid YAML ({problem}); {remedy}") from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{origin} has no `key: value` lines; `chargpt config` lists the settings"
        )
    return value, lines


def _to_python(loader: _Loader, node: yaml.Node, path: str, lines: dict[str, int]) -> Any:
    """Return a node as dicts, lists and scalars; record lines and reject repeated keys."""
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _fault("a key must be a single word", key_node)
            key = str(key_node.value)
            dotted = f"{path}.{key}" if path else key
            if len(dotted) > MAX_KEY_CHARACTERS:  # all are stored, each with its sections
                raise _fault("a key is too long, or nested too deep", key_node)
            if key in result:
                raise _fault(f"{dotted} is set twice, first on line {lines[dotted]}", key_node)
            lines[dotted] = key_node.start_mark.line + 1
            result[key] = _to_python(loader, value_node, dotted, lines)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_to_python(loader, child, path, lines) for child in node.value]
    if node.tag.endswith((":int", ":float", ":timestamp")) and (
        # dates, base-60 and very long numbers remain text, which no numeric setting accepts
        ":" in node.value or len(node.value) > MAX_NUMBER_CHARACTERS or node.tag.endswith("stamp")
    ):
        return node.value
    return loader.construct_object(node)


def dump_yaml(tree: dict[str, Any]) -> str:
    """Return YAML that `parse_yaml` reads back as equal values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
