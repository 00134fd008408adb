"""The layers, the size of functions, and what may be imported where."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import REPOSITORY

import chargpt

PACKAGE = Path(chargpt.__file__).parent
LAYERS = (
    "errors log distributed files outputs config device text models store inference "
    "training analysis export imports cli"
).split()
WITHOUT_TORCH = (
    "errors.py config.py distributed.py cli/main.py cli/console.py cli/options.py cli/data.py"
).split()
MAX_FUNCTION_LINES = 60  # signature and docstring not counted


def imports_of(path: Path, *, top_level: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.iter_child_nodes(tree) if top_level else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layers_imported(path: Path) -> set[str]:
    parts = (name.split(".") for name in imports_of(path) if name.startswith("chargpt."))
    return {part[1] for part in parts} & set(LAYERS)


def test_every_package_has_a_layer() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__main__", "__pycache__", "configs"} <= set(LAYERS)


def test_a_layer_imports_only_those_before_it() -> None:
    seen = 0
    for number, layer in enumerate(LAYERS):
        files = [*PACKAGE.glob(f"{layer}.py"), *(PACKAGE / layer).rglob("*.py")]
        for path in files:
            later = layers_imported(path) & set(LAYERS[number + 1 :])
            assert not later, f"{path.relative_to(PACKAGE)} imports {later}"
            seen += 1
    assert seen > 20


def test_files_import_each_other_without_cycles() -> None:
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(("chargpt", *path.relative_to(PACKAGE).with_suffix("").parts))
        graph[name.removesuffix(".__init__")] = imports_of(path, top_level=True)

    others = {name: names - {name} for name, names in graph.items()}
    assert set(TopologicalSorter(others).static_order()) >= graph.keys()  # or it is a CycleError


def test_help_imports_no_torch() -> None:
    for name in WITHOUT_TORCH:
        heavy = {"torch", "numpy", "matplotlib", "pydantic", "yaml"}
        if name == "config.py":
            heavy -= {"pydantic", "yaml"}
        assert not imports_of(PACKAGE / name, top_level=True) & heavy, name


def test_no_pickle_anywhere() -> None:
    """But for nanoGPT's files, by unpicklers that can run nothing (test_import.py)."""
    importer = PACKAGE / "imports.py"
    source = importer.read_text(encoding="utf-8")
    assert "pickle.load" not in source
    assert source.count("torch.load(") == source.count("weights_only=True")
    for path in set(PACKAGE.rglob("*.py")) - {importer}:
        names = imports_of(path)
        assert not names & {"pickle", "dill", "joblib", "shelve", "marshal"}, path
        source = path.read_text(encoding="utf-8")
        source = source.replace("safetensors.torch.", "")
        assert not re.search(r"torch\.(load|save)\(", source), path


def test_only_the_console_prints() -> None:
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "cli" / "console.py"}:
        calls = (n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call))
        assert "print" not in {getattr(call.func, "id", "") for call in calls}, path


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def test_no_function_is_longer_than_a_screen() -> None:
    for path, node in functions():
        body = node.body[1:] if ast.get_docstring(node) else node.body
        lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
        assert lines <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name}: {lines} lines"


LATE_IMPORTS = (
    ("config.py", "config"),  # the settings of a run, which need torch
    ("console.py", "__init__"),  # tqdm
    ("notebook.py", "show_result"),  # IPython
    ("train.py", "train"),  # the results of a run, at its end
)


def test_the_command_line_imports_at_the_top_of_its_files() -> None:
    for path, node in functions():
        if path.parent.name == "cli" and (path.name, node.name) not in LATE_IMPORTS:
            inner = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not inner, f"{path}:{node.lineno} {node.name} imports"


def test_the_glossary_names_what_exists() -> None:
    rows = [
        line.split("|")[1:-1]
        for line in (REPOSITORY / "docs" / "glossary.md").read_text("utf-8").splitlines()
        if line.startswith("|") and not line.startswith("|-")
    ][1:]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row[2])}
    sources = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    sources += "\n".join(str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*"))
    for name in named:
        last = re.split(r"[.(=]", name.removesuffix("()").removesuffix(".py"))[-1].strip()
        assert re.search(rf"\b{re.escape(last)}\b", sources), name
    missing = {name for name in chargpt.__all__ if f"`{name}`" not in str(rows)}
    assert not missing
