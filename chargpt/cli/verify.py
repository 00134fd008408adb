"""`chargpt verify`: whether what a run has saved is still what was saved."""

from pathlib import Path
from typing import Annotated

import typer

from chargpt.cli import console


def verify(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="A run's folder; without it, the newest."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that all a run has saved is whole; exit with 1 if not.

    Examples: `chargpt verify`, `chargpt verify runs/novel-gpt --json`.
    """
    import json

    from chargpt.store.run import newest_run, open_run
    from chargpt.store.verify import verify as check

    folder = open_run(run or newest_run())
    verdict = check(folder)
    used = {name: path.name if path else None for name, path in verdict.uses.items()}
    if json_:
        rows = [
            {"checkpoint": each.folder.name, "bytes": each.size, "problem": each.problem}
            for each in verdict.checkpoints
        ]
        report = {
            "run": str(folder.path),
            "whole": not verdict.problems,
            "checkpoints": rows,
            "uses": used,
            "problems": verdict.problems,
            "notes": verdict.notes,
        }
        console.out(json.dumps(report))
    else:
        names = {
            path: [n for n, p in verdict.uses.items() if p == path]
            for path in verdict.uses.values()
        }
        rows_ = [
            [
                each.folder.name,
                " and ".join(names.get(each.folder, [])),
                console.size(each.size),
                "damaged" if each.problem else "whole",
            ]
            for each in verdict.checkpoints
        ]
        console.table(["checkpoint", "used as", "size", "state"], rows_)
        for sentence in (*verdict.problems, *verdict.notes):
            console.out(sentence)
        if not verdict.problems:
            console.out(f"{folder.path} is whole: every byte is what was saved.")
    if verdict.problems:
        raise typer.Exit(1)
