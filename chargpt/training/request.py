"""What a user asks `chargpt train` or `chargpt.train` for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path

from chargpt.config import Config
from chargpt.distributed import world_size
from chargpt.errors import ConfigError
from chargpt.text.catalog import resolve_settings
from chargpt.text.source import STDIN
from chargpt.training.deadline import PLANNED_KEYS, Deadline, parse_duration

DEFAULT_BUDGET = "150s"
MAX_PATH = 4096  # characters; longer is a text in place of its path
PLANNED_SECTIONS = {"model", "train", "optim", "schedule"}  # with one set, no default budget


class StartMode(Enum):
    """What to do about a run that exists in the output folder."""

    NEW = "new"  # reject it
    RESUME = "resume"
    NEW_OR_RESUME = "new or resume"  # resume it if it has a checkpoint
    REPLACE = "replace"  # rename it


@dataclass(frozen=True)
class Request:
    """What a user asks `train` for; the fields are like the arguments of `chargpt.train`.

    `started` is when the command began, by `time.perf_counter`.
    """

    path: str | None = None
    text: str | None = None
    config: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    budget: str | float | None = None
    out: Path | None = None
    start: StartMode = StartMode.NEW
    started: float | None = None

    @cached_property
    def resolved(self) -> tuple[Config, frozenset[str]]:
        """The config of a new run, and the dotted keys of the settings that are fixed.

        Raises:
            ConfigError: a setting is wrong, or there are two texts.
        """
        if self.text is not None and self.path is not None:
            raise ConfigError("give the path of a text or the text itself, not both")
        if self.path is not None and (len(self.path) > MAX_PATH or "\n" in self.path):
            raise ConfigError("the path of the text is a text itself; give it as text=")
        path = self.path if self.text is None else STDIN
        return resolve_settings(path, self.config, self.settings)

    def changes(self) -> Mapping[str, object]:
        """Return the settings of a resumed run that are to change, by dotted keys.

        Raises:
            ConfigError: an argument applies only to a new run.
        """
        given = {"-c": self.config, "--budget": self.budget, "the text": self.text}
        if self.out is not None:  # else the path is that of the run
            given["the path"] = self.path
        if names := " and ".join(name for name, value in given.items() if value is not None):
            raise ConfigError(
                f"a resumed run keeps its text and settings; drop {names} (--resume with a text "
                "and --out, in Python start='new or resume', begins a run where there is none, and "
                "takes them)"
            )
        return self.settings

    def repeated_settings(self) -> dict[str, object]:
        """Return the settings that this request fixes for the whole run, by dotted keys.

        The command that started a run, given again, fixes the same ones.
        """
        config, fixed_keys = self.resolved
        keys = fixed_keys | {"text.path"}  # none given: the built-in text
        if self.budget is not None:  # planning and re-planning change them
            keys = keys.difference(PLANNED_KEYS)
        values = config.flatten()
        return {key: values[key] for key in sorted(keys)}

    def deadline(self) -> tuple[Deadline | None, frozenset[str]]:
        """Return the deadline of the budget asked for, or of the default one if nothing else was.

        The keys are those of the settings that planning must not change.

        Raises:
            ConfigError: it is not a duration, or several processes would have to agree on it.
        """
        duration, (_, fixed_keys) = self.budget, self.resolved
        sections = {key.partition(".")[0] for key in fixed_keys - {"train.from_run"}}
        is_default = self.config is None and sections.isdisjoint(PLANNED_SECTIONS)
        if duration is None and is_default and world_size() == 1:
            duration = DEFAULT_BUDGET
        if duration is None:
            return None, fixed_keys
        if world_size() > 1:
            raise ConfigError("--budget plans for one process; give train.max_steps instead")
        if "train.max_steps" not in self.settings:  # of a config: the budget takes precedence
            fixed_keys -= {"train.max_steps"}
        return Deadline.from_budget(parse_duration(duration), self.started), fixed_keys
