"""Draw docs/architecture.svg: the packages of chargpt in layer order and the imports between them.

    python scripts/draw_architecture.py

An arrow points from a package to one that it imports. Arrows that follow from others are omitted
(transitive reduction), and so are those to the top-level modules, which every package may import.
A test checks that the diagram is up to date.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "chargpt"
TARGET = ROOT / "docs" / "architecture.svg"
PACKAGES = {  # from the top layer down; each imports only from those after it
    "cli": "one command per file; the only code that prints",
    "imports": "models of other programs as runs",
    "export": "runs for other programs, which open and check them",
    "analysis": "comparisons, ladder, explanations, report, doctor",
    "training": "optimizers, schedule, time budget, training loop",
    "inference": "evaluate, sample, score, compress",
    "store": "run folders and checkpoints on disk",
    "models": "token ids in, logits out",
    "text": "text in, token ids out",
}
MODULES = ("device", "config", "outputs", "files", "distributed", "log", "errors")
WIDTH, MARGIN, GAP, MODULE_GAP, LINE = 920, 20, 26, 2, 18  # pixels
MAX_CHARACTERS = 125  # of a line of file names


def imports_of(package: str) -> set[str]:
    """Return the other packages that a package's files import."""
    names: set[str] = set()
    for path in [*PACKAGE.glob(f"{package}.py"), *(PACKAGE / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    imported = {name.split(".")[1] for name in names if name.startswith("chargpt.")}
    return imported & PACKAGES.keys() - {package}


def arrows() -> list[tuple[str, str]]:
    """Return the (importer, imported) pairs to draw: the transitive reduction."""
    direct = {package: imports_of(package) for package in PACKAGES}

    def reachable(package: str) -> set[str]:
        return direct[package].union(*(reachable(other) for other in direct[package]))

    return [
        (package, other)
        for package in PACKAGES
        for other in sorted(direct[package])
        if not any(other in reachable(between) for between in direct[package] - {other})
    ]


def label(package: str) -> list[str]:
    """Return the lines of a package's box: its name and purpose, then its files."""
    folder = PACKAGE / package
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    if not names:  # a module
        return [f"{package}.py   {PACKAGES[package]}"]
    lines = [f"{package}/   {PACKAGES[package]}", ""]
    for name in names:
        if not name.endswith("__init__.py"):
            if len(lines[-1]) + len(name) > MAX_CHARACTERS:
                lines.append("")
            lines[-1] += f"{name}   "
    return [line.rstrip() for line in lines]


def box(x: float, y: float, width: float, lines: list[str], fill: str) -> list[str]:
    """Return the SVG elements of a box with lines of text."""
    height = LINE * len(lines) + 14
    found = [
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height}" rx="5" '
        f'fill="{fill}" stroke="#777"/>'
    ]
    for number, line in enumerate(lines):
        style = 'fill="#111" font-weight="bold"' if number == 0 else 'fill="#444"'
        position = f'x="{x + 10:.0f}" y="{y + 21 + LINE * number:.0f}"'
        found.append(f'<text {position} {style} xml:space="preserve">{line}</text>')
    return found


def draw() -> str:
    """Return the diagram as SVG."""
    inner = WIDTH - 2 * MARGIN
    elements: list[str] = []
    edges: dict[str, tuple[float, float]] = {}  # top and bottom of each box
    y = float(MARGIN)
    for package in PACKAGES:
        lines = label(package)
        elements += box(MARGIN, y, inner, lines, "#e7f0fa")
        edges[package] = (y, y + LINE * len(lines) + 14)
        y = edges[package][1] + GAP
    width = (inner - MODULE_GAP * (len(MODULES) - 1)) / len(MODULES)
    for number, module in enumerate(MODULES):
        elements += box(MARGIN + number * (width + MODULE_GAP), y, width, [f"{module}.py"], "#eee")
    height = y + LINE + 14 + MARGIN
    pairs = arrows()
    for number, (start, end) in enumerate(pairs):
        x = WIDTH / 2 if len(pairs) < len(PACKAGES) else WIDTH * (number + 1) / (len(pairs) + 1)
        elements.append(
            f'<line x1="{x:.0f}" y1="{edges[start][1]:.0f}" x2="{x:.0f}" y2="{edges[end][0]:.0f}" '
            'stroke="#444" stroke-width="1.5" marker-end="url(#tip)"/>'
        )
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        'font-family="sans-serif" font-size="13">',
        "<title>Packages of chargpt and their imports</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="#444"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>',
    ]
    return "\n".join([*head, *elements, "</svg>", ""])


def main() -> None:
    """Write the diagram."""
    TARGET.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
