"""The documentation matches the code."""

import importlib.util
import json
import os
import sys
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


CALLED = """
import os, sys, threading
from pathlib import Path
import chargpt.cli.main

package, paths = str(Path(chargpt.__file__).parent), {}

def note(frame, event, _):
    code = frame.f_code
    is_function = code.co_flags & 1  # and not the body of a module or class
    if event == "call" and is_function and code.co_filename.startswith(package):
        paths.setdefault(code.co_filename)
        if code.co_name == "train_step" and code.co_filename.endswith("trainer.py"):
            found = map(Path, paths)
            print(*(path.parent.name if path.stem == "__init__" else path.stem for path in found))
            sys.stdout.flush()
            os._exit(0)

threading.setprofile(note)
sys.setprofile(note)
chargpt.cli.main.run()
"""


@pytest.mark.slow
def test_the_architecture_page_lists_the_modules_on_the_way_to_the_first_step(
    verse: Path, tmp_path: Path
) -> None:
    words = "--budget 60s --device cpu -s model.n_layer=1 -s model.n_embd=16".split()
    done = run_python(CALLED, tmp_path, "train", verse, *words)
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = page.split("```")[1].split()
    assert sorted(done.stdout.split()) == sorted(listed), done.stderr
    assert f"functions of {len(listed)} modules" in page


@pytest.mark.slow
def test_the_notebook_runs(verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, in a kernel of Jupyter, show what they are there to show, and no more."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "short.txt").write_text(verse.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    page = (REPOSITORY / "docs" / "tour.ipynb").read_text(encoding="utf-8")
    short = 'chargpt.train(\\"short.txt\\", budget=\\"5s\\")'
    assert page.count('chargpt.train(budget=\\"30s\\")') == 1
    tour = nbformat.reads(page.replace('chargpt.train(budget=\\"30s\\")', short), 4)
    nbclient.NotebookClient(tour, timeout=300, coalesce_streams=True).execute()
    cells = [cell.outputs for cell in tour.cells if cell.cell_type == "code"]
    trained, shown, *_, heads, difference, mistake, command = cells

    plan = next(each.text for each in trained if each.get("name") == "stdout")
    assert [line.split()[0] for line in plan.splitlines()[:2]] == ["budget", "text"]
    assert "%|" in json.dumps(trained)  # the progress bar
    assert "6-gram" in trained[-1].data["text/html"]
    assert "<svg" in shown[0].data["text/html"]
    assert "Evaluation(" in shown[1].data["text/plain"]
    assert "image/png" in heads[0].data  # matplotlib still draws into the notebook
    assert float(difference[0].text.rpartition(":")[2]) < 1e-5
    assert [line.partition(":")[0] for line in mistake[0].traceback] == ["UnknownCharacterError"]
    assert [each.text.split() for each in command] == [["runs/short-gpt/report.html"]]
    assert "Warning" not in json.dumps(cells)
