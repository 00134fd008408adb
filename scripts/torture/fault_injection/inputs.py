"""Invalid user input: texts, configs, prompts."""

import gzip
import json
import os
import socket
import string
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from chargpt.config import Config, load_config
from chargpt.errors import ChargptError, UnknownCharacterError
from chargpt.text.tokenizer import CharTokenizer
from fault_injection.processes import run_forked
from fault_injection.tiny_run import TEXT, check_rejection, empty_folder


def invalid_text(work: Path, index: int, random: Random) -> str | None:
    """Train on an unusable text; it must be rejected with exit code 2 and one sentence."""
    folder = empty_folder(work / "texts")
    path = folder / "text.txt"
    verse = TEXT.read_bytes()
    extra: list[str] = []
    short = bytes(random.choice(b"abcdef \n") for _ in range(random.randint(1, 12)))

    def listen() -> None:
        with socket.socket(socket.AF_UNIX) as at:
            at.bind(str(path))

    cut = random.randrange(200, len(verse))
    kinds: list[tuple[str, Callable[[], object]]] = [
        ("empty", lambda: path.write_bytes(b"")),
        ("short", lambda: path.write_bytes(short)),
        ("a BOM alone", lambda: path.write_bytes(b"\xef\xbb\xbf")),
        ("UTF-16, no BOM", lambda: path.write_bytes(verse.decode().encode("utf-16-le")[: 2 * cut])),
        ("byte 0x92", lambda: path.write_bytes(verse[:cut] + b"it\x92s" + verse[cut:])),
        ("a lone surrogate", lambda: path.write_bytes(verse[:cut] + b"\xed\xa0\x80")),
        ("random bytes", lambda: path.write_bytes(b"\x00\xff" + random.randbytes(5000))),
        ("a pipe", lambda: os.mkfifo(path)),
        ("an empty folder", lambda: path.mkdir()),
        (
            "a folder of images",
            lambda: (path.mkdir(), (path / "x.png").write_bytes(verse)),
        ),
        ("a socket", listen),
        ("missing", lambda: None),
        ("a link to itself", lambda: path.symlink_to(path)),
        ("truncated gzip", lambda: _gzip(folder, verse, random.randrange(20, 200), extra)),
        ("no such encoding", lambda: (path.write_bytes(verse), extra.extend(["--encoding", "no"]))),
    ]
    what, make = kinds[index % len(kinds)]
    make()
    text = extra.pop(0) if what == "truncated gzip" else "text.txt"
    result = run_forked(["train", text, *extra, "-s", "train.max_steps=1"], folder, seconds=30)
    wrong = check_rejection(result)
    return f"{what}: {wrong}" if wrong else None


def _gzip(folder: Path, verse: bytes, cut: int, extra: list[str]) -> None:
    (folder / "text.txt.gz").write_bytes(gzip.compress(verse)[:-cut])
    extra.append("text.txt.gz")


def known_keys() -> list[str]:
    """Return the dotted name of every config key."""
    tree = Config().model_dump()
    return [
        f"{section}.{key}"
        for section, keys in tree.items()
        if isinstance(keys, dict)
        for key in keys
    ]


def random_value(random: Random, depth: int = 0) -> Any:
    """Return a random YAML value."""
    simple: list[Callable[[], Any]] = [
        lambda: random.choice([None, True, False, "", "auto", "1e-4", "~", "5", "no", ".inf"]),
        lambda: random.choice([0, -1, 1, 2**63, 10**40, 65536, 7]),
        lambda: random.choice([0.5, -1e300, float("nan"), float("inf"), 1e-320]),
        lambda: "".join(random.choices(string.printable + "жé\u2028\x85", k=random.randrange(12))),
    ]
    deep: list[Callable[[], Any]] = [
        lambda: [random_value(random, depth + 1) for _ in range(random.randrange(3))],
        lambda: {str(random_value(random, 9)): random_value(random, depth + 1) for _ in range(2)},
    ]
    return random.choice(simple if depth > 2 else [*simple, *deep])()


def random_config(work: Path, _: int, random: Random) -> str | None:
    """Load a config of random keys and values; it must be accepted or rejected with a message."""
    keys = known_keys()
    tree: dict[str, Any] = {}
    for _ in range(random.randrange(6)):
        key = random.choice(keys) if random.random() < 0.8 else str(random_value(random, 9))
        section, _, name = key.partition(".")
        inside = tree.setdefault(section, {})
        if isinstance(inside, dict) and name:
            inside[name] = random_value(random)
        else:
            tree[section] = random_value(random)
    text = json.dumps(tree) if random.random() < 0.5 else _loose_yaml(tree)
    for _ in range(random.choice([0, 0, 1, 3])):  # random syntax errors
        at = random.randrange(len(text) + 1)
        text = (
            text[:at]
            + random.choice([":", "\t", "&a", "*a", "- ", "\n", "{", "#", "!!python"])
            + text[at:]
        )
    path = work / "random.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        load_config(path)
    except ChargptError as error:
        if not str(error):
            return f"no message for {text!r}"
    except Exception as error:
        return f"{type(error).__name__} {error} for {text!r}"
    return None


def _loose_yaml(tree: dict[str, Any]) -> str:
    lines = []
    for section, keys in tree.items():
        lines.append(f"{section}:" + ("" if isinstance(keys, dict) else f" {keys}"))
        if isinstance(keys, dict):
            lines += [f"  {name}: {value}" for name, value in keys.items()]
    return "\n".join(lines)


def misspelled_key(work: Path, index: int, random: Random) -> str | None:
    """Misspell a key by one letter; the error must suggest the correct key."""
    keys = [key for key in known_keys() if len(key.split(".")[1]) > 4]
    key = keys[index % len(keys)]
    section, _, name = key.partition(".")
    at = random.randrange(1, len(name) - 1)
    spelt = random.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + name[at] + name[at:],
            name[:at] + name[at + 1] + name[at] + name[at + 2 :],
        ]
    )
    if spelt == name:
        spelt = name[:at] + name[at + 1 :]
    (work / "misspelled_key.yaml").write_text(f"{section}:\n  {spelt}: 1\n")
    try:
        load_config(work / "misspelled_key.yaml")
    except ChargptError as error:
        return None if f"did you mean {key}?" in str(error) else f"{spelt} for {key}: {error}"
    return f"{section}.{spelt} was accepted"


def random_text(random: Random) -> str:
    """Return a random text from one Unicode range."""
    ranges = [(32, 127), (0, 32), (0x400, 0x500), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0, 0xD7FF)]
    low, high = random.choice(ranges)
    return "".join(chr(random.randint(low, high)) for _ in range(random.randint(1, 60)))


def round_trip(work: Path, _: int, random: Random) -> str | None:
    """Check that decode(encode(text)) == text after saving and loading the tokenizer."""
    text = random_text(random)
    tokenizer = CharTokenizer.fit(text)
    loaded = CharTokenizer.from_json(tokenizer.to_json())
    sample = "".join(random.choices(text, k=20))
    if loaded != tokenizer or loaded.decode(tokenizer.encode(sample)) != sample:
        return f"{text!r} does not round-trip"
    return None


def unseen_characters(work: Path, _: int, random: Random) -> str | None:
    """Encode a prompt with unseen characters under each policy: error, skip, replace."""
    tokenizer, prompt = CharTokenizer.fit(TEXT.read_text(encoding="utf-8")), random_text(random)
    seen = [c for c in prompt if c in tokenizer.characters]
    if len(tokenizer.encode(prompt, unknown="skip")) != len(seen):
        return f"{prompt!r}: skip did not drop exactly the unseen characters"
    if len(tokenizer.encode(prompt, unknown="replace")) != len(prompt):
        return f"{prompt!r}: replace changed the length"
    try:
        tokenizer.encode(prompt)
    except UnknownCharacterError:
        return None if len(seen) < len(prompt) else f"{prompt!r} was rejected"
    return None if len(seen) == len(prompt) else f"{prompt!r} was accepted"
