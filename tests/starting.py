"""Helpers that start and resume runs as `chargpt train` does, without its request and its lock."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from chargpt.config import Config
from chargpt.inference.evaluation import Baselines
from chargpt.log import collected_notes
from chargpt.store.checkpoint import Checkpoint
from chargpt.store.folder import RunFolder
from chargpt.text.prepare import prepare
from chargpt.text.source import find_text
from chargpt.training.budget import plan_run
from chargpt.training.deadline import Deadline, Pace
from chargpt.training.resume import changed_config, continued_config
from chargpt.training.start import Session, start_run


def create_run(
    config: Config, path: Path, deadline: Deadline | None = None, fixed_keys: Collection[str] = ()
) -> Session:
    folder, pace = RunFolder(path), None
    corpus = prepare(find_text(config.text), config.text, folder.new_text)
    if deadline is not None:
        config, corpus, pace = plan_run(config, corpus, deadline, frozenset(fixed_keys))
    return start_run(folder, config, corpus, Baselines(corpus), pace=pace)


def pace_of(deadline: Deadline, config: Config = Config(), **values: Any) -> Pace:
    given = {"speed": 1e5, "size_was_chosen": True, "step_limit": 10**9, **values}
    return Pace(deadline, config, **given)


def resume(
    folder: RunFolder, changes: dict[str, object], *, same_command: bool = False
) -> tuple[Checkpoint, Config, list[str]]:
    with collected_notes() as notes:
        saved = folder.load("latest")
        config = continued_config(saved, changed_config(saved, changes, same_command=same_command))
    return saved, config, notes
