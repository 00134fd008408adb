"""`chargpt config`: every setting with its type, default and meaning."""

import json
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, Cli
from test_docs import load_script

from chargpt.config import Config


def test_config_lists_every_setting_with_a_meaning(cli: Cli) -> None:
    listed = json.loads(cli("config", "--json").stdout)
    tree = Config().model_dump(mode="json")
    for each in listed:
        section, _, name = each["key"].rpartition(".")
        assert each["default"] == (tree[section] if section else tree)[name]
        assert each["meaning"].endswith(".")
    sections = [value for value in tree.values() if isinstance(value, dict)]
    assert len(listed) == len(tree) - len(sections) + sum(map(len, sections))
    types = {each["key"]: each["type"] for each in listed}
    assert types["model.n_layer"] == "integer >= 1, <= 256"
    assert types["train.patience"] == "integer >= 1, or null"
    assert types["text.unknown"] == "one of error, skip, replace"


def test_config_shows_one_setting_or_section_and_a_runs_values(trained: Path, cli: Cli) -> None:
    one = cli("config", "train.max_steps", "--run", trained).stdout
    assert one.startswith("train.max_steps = 40   (default 650; integer >= 1)\n")
    section = cli("config", "optim").stdout
    assert section.count("optim.") == 5


@pytest.mark.parametrize("value", ["true", "\n\n", "a: b", "plain words"])
def test_config_shows_a_string_as_yaml_that_is_read_back(value: str, cli: Cli) -> None:
    Path("c.yaml").write_text(Config().with_values({"text.documents": value}).to_yaml())
    shown = cli("config", "text.documents", "-c", "c.yaml").stdout.splitlines()[0]
    written = shown.removeprefix("text.documents = ").partition("   (")[0]
    assert yaml.safe_load(written) == value


def test_the_page_of_settings_is_up_to_date() -> None:
    script = load_script(REPOSITORY / "scripts" / "write_config_page.py")
    assert script.TARGET.read_text(encoding="utf-8") == script.page()
