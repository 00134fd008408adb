"""Every command, setting, link and figure of the README is valid."""

import itertools
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, Cli, run_cli, run_python
from test_docs import load_script

import chargpt
from chargpt.cli import data

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.strip()]
SHORT = shlex.split(
    "-s train.max_steps=4 -s train.batch_size=4 -s train.micro_batches=1 -s train.evaluate_every=2 "
    "-s model.n_layer=1 -s model.n_head=1 -s model.n_embd=16 -s model.block_size=16 "
    "-s train.sample_every=0 -s train.evaluation_tokens=300"
)


def test_the_readme_begins_with_its_two_commands() -> None:
    assert BLOCKS[0].strip() == "pip install . && chargpt train"
    assert BLOCKS[1].strip() == "pip install '.[dev]' && pytest -n auto"


def test_the_workflow_runs_the_two_commands_on_three_systems() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text("utf-8"))
    [job] = workflow["jobs"].values()
    matrix = job["strategy"]["matrix"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [block.strip() for block in BLOCKS[:2]]
    assert [name.partition("-")[0] for name in matrix["os"]] == ["ubuntu", "macos", "windows"]
    assert (matrix["python"], job["strategy"]["fail-fast"]) == (["3.11", "3.13"], False)


@pytest.mark.slow
def test_every_command_of_the_readme_runs(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run them in order in one folder, with few training steps."""
    text = (REPOSITORY / "data" / "lighthouse.txt").read_text(encoding="utf-8")
    # as in ordinary prose, with characters that Shakespeare's text lacks
    Path("novel.txt").write_text(text + "“Naïve,” she said — and left…\n" * 20, encoding="utf-8")
    Path("books").mkdir()
    shutil.copy("novel.txt", "books/one.txt")
    Path("prompt.txt").write_text("ORLA:")
    Path("after.txt").write_text(" the sea.")
    parts = ["An Be Cla Do".split(), "ra la ri mo".split(), "n na s el".split()]
    names = "".join("".join(each) + "\n" for each in itertools.product(*parts))
    Path("names.txt").write_text(names, encoding="utf-8")
    Path("data").mkdir()
    Path("data/tinyshakespeare.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(data, "fetch", lambda entry, to, progress: to / f"{entry.name}.txt")
    ran = 0
    for command in COMMANDS:
        first, _, second = command.replace("&&", "|").partition("|")
        args = shlex.split(second or first)
        if args[0] in ("pytest", "torchrun"):
            continue  # the tests themselves; and test_distributed.py
        assert args[0] == "chargpt", command
        assert not second or first.split()[0] in ("pip", "cat"), command
        trains = args[1] == "train" or (args[1] == "compare" and not Path(args[2]).is_dir())
        if trains and "--resume" not in args:
            args += [*SHORT, "--device", "cpu"]
        if "--ladder" in args:  # it trains models with several heads and layers
            args += ["-s", "model.n_layer=2", "-s", "model.n_head=2"]
        if "--budget" in args:  # a budget excludes max_steps: see test_cli_budget.py
            del args[args.index("--budget") : args.index("--budget") + 2]
            args += ["-s", "text.mixture_characters=500"]  # as a budget sets it
        if args[1] == "train" and "--resume" in args:
            args += ["-s", "train.max_steps=6"]
        if args[1] == "play":
            args += ["--no-open"]
        if args[1] == "sample" and "--length" not in args:
            args += ["--length", "20"]
        if "-" in args or "--interactive" in args:
            done = run_cli(*args[1:], cwd=Path.cwd(), stdin=text if "-" in args else text[:50])
        else:
            done = cli(*args[1:])
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        ran += 1
    assert ran >= 30


def test_every_setting_that_the_readme_names_exists() -> None:
    names = set(re.findall(r"`((?:text|model|train|optim|schedule|sample)\.\w+)", README))
    assert len(names) > 5
    assert names <= chargpt.Config().flatten().keys()


@pytest.mark.slow
def test_the_python_of_the_readme_runs(verse: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    short = verse.read_text(encoding="utf-8")[:6000]  # whose epochs take seconds
    (tmp_path / "novel.txt").write_text(short, encoding="utf-8")
    assert block.count('{"optim.lr"') == 1  # of four trainings
    done = run_python(block.replace('{"optim.lr"', '{"train.max_steps": 3, "optim.lr"'), tmp_path)
    assert done.returncode == 0, done.stderr


def test_local_links_of_the_readme_and_docs_exist() -> None:
    folders = (REPOSITORY, REPOSITORY / "docs", REPOSITORY / "data", REPOSITORY / "benchmarks")
    for page in (path for folder in folders for path in folder.glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_public_name_can_be_imported(tmp_path: Path) -> None:
    for name in chargpt.__all__:
        assert getattr(chargpt, name).__doc__
    assert set(chargpt.__all__) <= set(dir(chargpt))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        chargpt.nonsense  # noqa: B018
    done = run_cli("--version", cwd=tmp_path)
    assert done.stdout.startswith("chargpt ")


def test_results_between_the_markers_equal_the_generated_ones() -> None:
    script = load_script(REPOSITORY / "scripts" / "bench" / "write_results.py")
    pages = script.pages()
    names = {str(path.relative_to(REPOSITORY)) for path in pages}
    documents = {"docs/reliability.md", "docs/security.md"}
    assert names == {"README.md", "benchmarks/README.md", *documents}
    for path, content in pages.items():
        assert path.read_text(encoding="utf-8") == content
        assert content.count(script.START) == content.count(script.END) == 1
