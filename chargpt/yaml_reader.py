"""YAML as people mean it: lines kept, nothing silent, nothing that can cost much.

Repeated keys and aliases are refused; `1e-4` is a number; dates and base-60 numbers stay text.
"""

import re
from typing import Any

import yaml

from chargpt.errors import ConfigError

MAX_YAML_BYTES = 200_000  # the parser takes seconds for a megabyte
MAX_DEPTH = 20
MAX_NUMBER_CHARACTERS = 100


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: `1e-4` is a number, aliases are refused."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"{self.name}, line {mark.line + 1}: an alias (*name) is not allowed; "
                "write the value out, or put it in quotes if it is text"
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: a text such as `1e5` in quotes."""


def _quoted_if_odd(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # the other styles lose line breaks such as U+0085
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted_if_odd)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def parse_yaml(source: str, origin: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a YAML mapping as a dict, and the line of each dotted key.

    Raises:
        ConfigError: the text is not a YAML mapping, or repeats a key.
    """
    if len(source) > MAX_YAML_BYTES:
        raise ConfigError(f"{origin} is over {MAX_YAML_BYTES:,} bytes: not a config; name another")
    try:
        loader = _Loader(source)
        loader.name = origin
        try:
            node = loader.get_single_node()
            lines: dict[str, int] = {}
            value = {} if node is None else _plain(loader, node, "", lines, origin, 0)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # the last four: numbers, dates and so on that are not what their tag says
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or (str(error) or "empty").splitlines()[0]
        raise ConfigError(f"{origin}{where} is not valid YAML ({problem}); correct it") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{origin} holds no `key: value` lines; see `configs/gpt.yaml` for one")
    return value, lines


def _plain(
    loader: _Loader, node: yaml.Node, path: str, lines: dict[str, int], origin: str, depth: int
) -> Any:
    """Turn a node into dicts, lists and scalars, noting lines and refusing repeated keys."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{origin} nests more than {MAX_DEPTH} levels deep; flatten it")
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{origin}, line {line}: a key must be a single word; correct it")
            key = str(key_node.value)
            dotted = f"{path}.{key}" if path else key
            if key in result:
                raise ConfigError(
                    f"{origin}, line {line}: {dotted} is set twice "
                    f"(first on line {lines[dotted]}); keep one"
                )
            lines[dotted] = line
            result[key] = _plain(loader, value_node, dotted, lines, origin, depth + 1)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, child, path, lines, origin, depth + 1) for child in node.value]
    if node.tag.endswith((":int", ":float", ":timestamp")) and (
        # base 60, dates and endless digits are not settings: left as text, and refused as such
        ":" in node.value or len(node.value) > MAX_NUMBER_CHARACTERS or node.tag.endswith("stamp")
    ):
        return node.value
    return loader.construct_object(node)


def dump_yaml(tree: dict[str, Any]) -> str:
    """Return plain values as YAML that `parse_yaml` reads back equal."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
