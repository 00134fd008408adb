"""The documentation matches the code."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from conftest import REPOSITORY, run_python


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_architecture_picture_is_up_to_date() -> None:
    script = load_script(REPOSITORY / "scripts" / "draw_architecture.py")
    assert script.TARGET.read_text(encoding="utf-8") == script.draw()


def test_the_files_that_the_architecture_page_names_exist() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    words = [word for word in page.split("`")[1::2] if "/" in word and "NAME" not in word]
    assert len(words) > 20
    for word in words:
        assert any((folder / word).exists() for folder in (REPOSITORY, REPOSITORY / "chargpt")), (
            word
        )


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((REPOSITORY / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    done = run_python(code.replace('budget="30s"', 'budget="6s"'), tmp_path)
    assert done.returncode == 0, done.stderr
    difference = float(done.stdout.rpartition("largest difference:")[2])
    assert difference < 1e-5
    assert "6-gram" in done.stdout
