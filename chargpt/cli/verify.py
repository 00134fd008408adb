"""`chargpt verify`: integrity check of a run."""

import typer

from chargpt.cli import console, options, runs, tables
from chargpt.store import verify as checks
from chargpt.store.run import open_run


def verify(run: options.RunOrNewest = None, json_: options.Json = False) -> None:
    """Verify that every checkpoint of a run is intact.

    The exit code is 1 if one is damaged.

    Examples: `chargpt verify`, `chargpt verify runs/novel-gpt --json`.
    """
    folder = open_run(runs.find_run(run))
    result = checks.verify(folder)
    if json_:
        checkpoints = [
            {"checkpoint": each.folder.name, "bytes": each.size, "problem": each.problem}
            for each in result.checkpoints
        ]
        console.out_json(
            {
                "run": str(folder.path),
                "intact": not result.problems,
                "checkpoints": checkpoints,
                "loaded_by": {name: path and path.name for name, path in result.loaded_by.items()},
                "problems": result.problems,
                "notes": result.notes,
            }
        )
    else:
        rows = [
            [
                each.folder.name,
                " and ".join(
                    name for name, path in result.loaded_by.items() if path == each.folder
                ),
                console.size(each.size),
                "damaged" if each.problem else "intact",
            ]
            for each in result.checkpoints
        ]
        tables.table(["checkpoint", "loaded as", "size", "state"], rows)
        for sentence in (*result.problems, *result.notes):
            console.out_sentence(sentence)
        if not result.problems:
            console.out_sentence(f"{folder.path} is intact: every byte matches its SHA-256.")
    if result.problems:
        raise typer.Exit(1)
