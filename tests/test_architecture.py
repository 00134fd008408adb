"""The rooms import only rooms above them."""

import ast
import re
from pathlib import Path

import chargpt

PACKAGE = Path(chargpt.__file__).parent
ROOMS = (
    "errors",
    "files",
    "yaml_reader",
    "config",
    "device",
    "distributed",
    "text",
    "models",
    "store",
    "inference",
    "training",
    "analysis",
    "cli",
)
TORCHLESS = ("errors.py", "config.py", "cli/main.py", "cli/console.py", "cli/options.py")


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


def rooms_imported(path: Path) -> set[str]:
    parts = (name.split(".") for name in imports_of(path) if name.startswith("chargpt."))
    return {part[1] for part in parts} & set(ROOMS)


def test_every_room_is_known() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__main__", "__pycache__", "configs"} <= set(ROOMS)


def test_rooms_import_only_rooms_above_them() -> None:
    seen = 0
    for number, room in enumerate(ROOMS):
        files = [*PACKAGE.glob(f"{room}.py"), *(PACKAGE / room).rglob("*.py")]
        for path in files:
            below = rooms_imported(path) & set(ROOMS[number + 1 :])
            assert not below, f"{path.relative_to(PACKAGE)} imports {below}"
            seen += 1
    assert seen > 20


def test_siblings_import_each_other_without_circles() -> None:
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(("chargpt", *path.relative_to(PACKAGE).with_suffix("").parts))
        graph[name.removesuffix(".__init__")] = imports_of(path, top_level=True)

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        for other in graph[name] & graph.keys():
            if other != name:
                visit(other, (*trail, name))

    for name in graph:
        visit(name, ())


def test_help_needs_no_torch() -> None:
    for name in TORCHLESS:
        heavy = {"torch", "numpy", "matplotlib", "pydantic", "yaml"}
        if name == "config.py":
            heavy -= {"pydantic", "yaml"}
        assert not imports_of(PACKAGE / name, top_level=True) & heavy, name


def test_only_the_console_prints() -> None:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
                assert path.name == "console.py", f"{path}:{node.lineno}"


def test_no_pickle_anywhere() -> None:
    for path in PACKAGE.rglob("*.py"):
        names = imports_of(path)
        assert not names & {"pickle", "dill", "joblib", "shelve", "marshal"}, path
        source = path.read_text(encoding="utf-8")
        source = source.replace("safetensors.torch.", "")
        assert not re.search(r"torch\.(load|save)\(", source), path
