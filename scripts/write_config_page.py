"""Write docs/config.md: every setting with its type, default and meaning, as `chargpt config` does.

    python scripts/write_config_page.py

A test checks that the page is up to date.
"""

from itertools import groupby
from pathlib import Path

from chargpt.cli.config import in_yaml, settings
from chargpt.config import Config, Settings

TARGET = Path(__file__).parents[1] / "docs" / "config.md"
INTRODUCTION = """# Settings

A config is a YAML file with a section per heading below; what it omits has its default.
`-s KEY=VALUE` changes a setting on the command line, as in `chargpt train -s train.max_steps=500`.
`chargpt config` prints this list, `chargpt config --run RUN` with the values of a run. The file is
written by `scripts/write_config_page.py`.
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [INTRODUCTION]
    for section, group in groupby(settings(Config()), key=lambda each: each.key.rpartition(".")[0]):
        if section:
            value = getattr(Config(), section)
            assert isinstance(value, Settings)
            parts.append(f"\n## {section}\n\n{value.__doc__}\n")
        parts.append("\n| setting | default | type | meaning |\n|---|---|---|---|\n")
        for each in group:
            cells = (f"`{each.key}`", f"`{in_yaml(each.default)}`", each.type, each.meaning)
            parts.append("| " + " | ".join(cells) + " |\n")
    return "".join(parts)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
