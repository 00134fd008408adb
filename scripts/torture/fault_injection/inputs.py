"""What people type and hand in: texts, settings, prompts."""

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
from fault_injection.tiny_run import TEXT, fresh, refused


def bad_text(work: Path, index: int, random: Random) -> str | None:
    """Give what is no text, or none to train on; one sentence must say so."""
    folder = fresh(work / "texts")
    path = folder / "text.txt"
    verse = TEXT.read_bytes()
    extra: list[str] = []
    words = bytes(random.choice(b"abcdef \n") for _ in range(random.randint(1, 12)))

    def listen() -> None:
        with socket.socket(socket.AF_UNIX) as at:
            at.bind(str(path))

    cut = random.randrange(200, len(verse))
    kinds: list[tuple[str, Callable[[], object]]] = [
        ("empty", lambda: path.write_bytes(b"")),
        ("short", lambda: path.write_bytes(words)),
        ("a BOM alone", lambda: path.write_bytes(b"\xef\xbb\xbf")),
        ("UTF-16, no BOM", lambda: path.write_bytes(verse.decode().encode("utf-16-le")[: 2 * cut])),
        ("byte 0x92", lambda: path.write_bytes(verse[:cut] + b"it\x92s" + verse[cut:])),
        ("a lone surrogate", lambda: path.write_bytes(verse[:cut] + b"\xed\xa0\x80")),
        ("random bytes", lambda: path.write_bytes(b"\x00\xff" + random.randbytes(5000))),
        ("a pipe", lambda: os.mkfifo(path)),
        ("an empty folder", lambda: path.mkdir()),
        ("a folder of others", lambda: (path.mkdir(), (path / "x.png").write_bytes(verse))),
        ("a socket", listen),
        ("missing", lambda: None),
        ("a link to itself", lambda: path.symlink_to(path)),
        ("gzip, cut", lambda: _gzip(folder, verse, random.randrange(20, 200), extra)),
        ("no such encoding", lambda: (path.write_bytes(verse), extra.extend(["--encoding", "no"]))),
    ]
    what, make = kinds[index % len(kinds)]
    make()
    text = extra.pop(0) if what == "gzip, cut" else "text.txt"
    ended = run_forked(["train", text, *extra, "-s", "train.max_steps=1"], folder, seconds=30)
    wrong = refused(ended)
    return f"{what}: {wrong}" if wrong else None


def _gzip(folder: Path, verse: bytes, cut: int, extra: list[str]) -> None:
    (folder / "text.txt.gz").write_bytes(gzip.compress(verse)[:-cut])
    extra.append("text.txt.gz")


def known_keys() -> list[str]:
    """Return every setting's dotted key."""
    tree = Config().model_dump()
    return [
        f"{section}.{key}"
        for section, keys in tree.items()
        if isinstance(keys, dict)
        for key in keys
    ]


def any_value(random: Random, depth: int = 0) -> Any:
    """Return something that YAML can hold."""
    simple: list[Callable[[], Any]] = [
        lambda: random.choice([None, True, False, "", "auto", "1e-4", "~", "5", "no", ".inf"]),
        lambda: random.choice([0, -1, 1, 2**63, 10**40, 65536, 7]),
        lambda: random.choice([0.5, -1e300, float("nan"), float("inf"), 1e-320]),
        lambda: "".join(random.choices(string.printable + "жé\u2028\x85", k=random.randrange(12))),
    ]
    deep: list[Callable[[], Any]] = [
        lambda: [any_value(random, depth + 1) for _ in range(random.randrange(3))],
        lambda: {str(any_value(random, 9)): any_value(random, depth + 1) for _ in range(2)},
    ]
    return random.choice(simple if depth > 2 else [*simple, *deep])()


def any_config(work: Path, _: int, random: Random) -> str | None:
    """Read a config of likely and unlikely keys and values: it is taken, or refused in words."""
    keys = known_keys()
    tree: dict[str, Any] = {}
    for _ in range(random.randrange(6)):
        key = random.choice(keys) if random.random() < 0.8 else str(any_value(random, 9))
        section, _, name = key.partition(".")
        inside = tree.setdefault(section, {})
        if isinstance(inside, dict) and name:
            inside[name] = any_value(random)
        else:
            tree[section] = any_value(random)
    text = json.dumps(tree) if random.random() < 0.5 else _loose_yaml(tree)
    for _ in range(random.choice([0, 0, 1, 3])):  # and some damage
        at = random.randrange(len(text) + 1)
        text = (
            text[:at]
            + random.choice([":", "\t", "&a", "*a", "- ", "\n", "{", "#", "!!python"])
            + text[at:]
        )
    path = work / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        load_config(path)
    except ChargptError as error:
        if not str(error):
            return f"no words for {text!r}"
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


def typo(work: Path, index: int, random: Random) -> str | None:
    """Misspell a key by one letter: the right one must be suggested."""
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
    (work / "typo.yaml").write_text(f"{section}:\n  {spelt}: 1\n")
    try:
        load_config(work / "typo.yaml")
    except ChargptError as error:
        return None if f"did you mean {key}?" in str(error) else f"{spelt} for {key}: {error}"
    return f"{section}.{spelt} was taken"


def any_text(random: Random) -> str:
    """Return a text of characters from anywhere in Unicode."""
    ranges = [(32, 127), (0, 32), (0x400, 0x500), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0, 0xD7FF)]
    low, high = random.choice(ranges)
    return "".join(chr(random.randint(low, high)) for _ in range(random.randint(1, 60)))


def round_trip(work: Path, _: int, random: Random) -> str | None:
    """Fit, encode, decode, save and load: the text comes back."""
    text = any_text(random)
    tokenizer = CharTokenizer.fit(text)
    again = CharTokenizer.from_json(tokenizer.to_json())
    part = "".join(random.choices(text, k=20))
    if again != tokenizer or again.decode(tokenizer.encode(part)) != part:
        return f"{text!r} did not come back"
    return None


def unseen_prompt(work: Path, _: int, random: Random) -> str | None:
    """Give a prompt of other characters: refused in words, or handled as asked."""
    tokenizer, prompt = CharTokenizer.fit(TEXT.read_text(encoding="utf-8")), any_text(random)
    seen = [c for c in prompt if c in tokenizer.characters]
    if len(tokenizer.encode(prompt, unknown="skip")) != len(seen):
        return f"{prompt!r}: skip kept something else"
    if len(tokenizer.encode(prompt, unknown="replace")) != len(prompt):
        return f"{prompt!r}: replace changed the length"
    try:
        tokenizer.encode(prompt)
    except UnknownCharacterError:
        return None if len(seen) < len(prompt) else f"{prompt!r} was refused"
    return None if len(seen) == len(prompt) else f"{prompt!r} was taken"
