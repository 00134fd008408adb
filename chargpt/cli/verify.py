"""`chargpt verify`: integrity check of a run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from chargpt.cli import console, tables
from chargpt.store import verify as checks
from chargpt.store.run import newest_run, open_run


def verify(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="The run's folder (default: the newest run)."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify that every checkpoint of a run is intact.

    The exit code is 1 if one is damaged.

    Examples: `chargpt verify`, `chargpt verify runs/novel-gpt --json`.
    """
    folder = open_run(run or newest_run())
    result = checks.verify(folder)
    used = {name: path.name if path else None for name, path in result.uses.items()}
    if json_:
        rows = [
            {"checkpoint": each.folder.name, "bytes": each.size, "problem": each.problem}
            for each in result.checkpoints
        ]
        report = {
            "run": str(folder.path),
            "intact": not result.problems,
            "checkpoints": rows,
            "uses": used,
            "problems": result.problems,
            "notes": result.notes,
        }
        console.out(json.dumps(report))
    else:
        names = {
            path: [n for n, p in result.uses.items() if p == path] for path in result.uses.values()
        }
        rows_ = [
            [
                each.folder.name,
                " and ".join(names.get(each.folder, [])),
                console.size(each.size),
                "damaged" if each.problem else "intact",
            ]
            for each in result.checkpoints
        ]
        tables.table(["checkpoint", "used as", "size", "state"], rows_)
        for sentence in (*result.problems, *result.notes):
            console.out(sentence)
        if not result.problems:
            console.out(f"{folder.path} is intact: every byte matches its SHA-256.")
    if result.problems:
        raise typer.Exit(1)
