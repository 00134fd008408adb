"""YAML: a strict and bounded reader that records the line of each key, and a writer.

Repeated keys and aliases are rejected; `1e-4` is a number; dates and base-60 numbers remain text.
"""

import re
from typing import Any

import yaml

from chargpt.errors import ConfigError

MAX_YAML_CHARACTERS = 200_000  # the parser takes seconds for a megabyte
MAX_DEPTH = 20
MAX_NUMBER_CHARACTERS = 100


class _Loader(yaml.SafeLoader):
    """Loader that reads `1e-4` as a number and rejects aliases."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"{self.name}, line {mark.line + 1}: an alias (*name) is not allowed; "
                "write out the value, or quote it if it is text"
            )
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
        loader.name = origin
        node = loader.get_single_node()
        value = {} if node is None else _to_python(loader, node, "", lines, 0)
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


def _to_python(
    loader: _Loader, node: yaml.Node, path: str, lines: dict[str, int], depth: int
) -> Any:
    """Return a node as dicts, lists and scalars; record lines and reject repeated keys."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{loader.name} is nested more than {MAX_DEPTH} levels deep; flatten it")
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(
                    f"{loader.name}, line {line}: a key must be a single word; correct it"
                )
            key = str(key_node.value)
            dotted = f"{path}.{key}" if path else key
            if key in result:
                raise ConfigError(
                    f"{loader.name}, line {line}: {dotted} is set twice "
                    f"(first on line {lines[dotted]}); keep one"
                )
            lines[dotted] = line
            result[key] = _to_python(loader, value_node, dotted, lines, depth + 1)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_to_python(loader, child, path, lines, depth + 1) for child in node.value]
    if node.tag.endswith((":int", ":float", ":timestamp")) and (
        # dates, base-60 and very long numbers remain text, which no numeric setting accepts
        ":" in node.value or len(node.value) > MAX_NUMBER_CHARACTERS or node.tag.endswith("stamp")
    ):
        return node.value
    return loader.construct_object(node)


def dump_yaml(tree: dict[str, Any]) -> str:
    """Return YAML that `parse_yaml` reads back as equal values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
