"""What a user asks `chargpt train` or `chargpt.train` for."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from chargpt.config import Config, parse_override, read_config_tree
from chargpt.errors import ConfigError
from chargpt.ranks import world_size
from chargpt.text.build_config import build_config
from chargpt.text.source import STDIN
from chargpt.training.budget import Budget, parse_duration

DEFAULT_BUDGET = "150s"
MAX_PATH = 4096  # characters; longer is a text in place of its path
PLANNED_SECTIONS = {"model", "train", "optim", "schedule"}  # with one set, no default budget


class StartMode(Enum):
    """What to do about a run that exists in the output folder."""

    NEW = "new"  # reject it
    RESUME = "resume"
    NEW_OR_RESUME = "new or resume"  # resume it if it has a checkpoint
    REPLACE = "replace"


@dataclass(frozen=True)
class Request:
    """What a user asks `train` for; the fields are like the arguments of `chargpt.train`."""

    path: str | None = None
    text: str | None = None
    config: str | None = None
    overrides: tuple[str, ...] = ()
    budget: str | None = None
    out: Path | None = None
    start: StartMode = StartMode.NEW
    device: str | None = None
    started: float | None = None

    def run_config(self) -> Config:
        """Return the config of a new run.

        Raises:
            ConfigError: a setting is wrong, or there are two texts.
        """
        if self.text is not None and self.path is not None:
            raise ConfigError("give the path of a text or the text itself, not both")
        if self.path is not None and (len(self.path) > MAX_PATH or "\n" in self.path):
            raise ConfigError("the path of the text is a text itself; give it as text=")
        path = self.path if self.text is None else STDIN
        return build_config(path, self.config, self.overrides, device=self.device)

    def changes(self) -> dict[str, object]:
        """Return the settings of a resumed run that are to change, by dotted keys.

        Raises:
            ConfigError: an argument applies only to a new run.
        """
        given = {"-c": self.config, "--budget": self.budget}
        if names := " and ".join(name for name, value in given.items() if value is not None):
            raise ConfigError(
                f"--resume takes its settings from the run; drop {names} (--resume with a text and "
                "--out, which begins a run where there is none, takes both)"
            )
        if self.text is not None or (self.path is not None and self.out is not None):
            raise ConfigError(
                "start 'resume' takes the text from the run; drop the text, or begin the run where "
                "there is none with start='new or resume'"
            )
        values = dict(parse_override(override) for override in self.overrides)
        return values if self.device is None else {**values, "device": self.device}

    def fixed_values(self, config: Config) -> dict[str, object]:
        """Return the values in `config` of the keys that this request sets for the whole run."""
        keys = self.fixed_keys() | {"text.path"}  # none given: the built-in text
        if self.device is not None:
            keys.add("device")
        if self.budget is not None:
            # planning and re-planning change them
            keys -= {"train.max_steps", "schedule.cooldown", "schedule.decay_points"}
        values = config.flatten()
        return {key: values[key] for key in sorted(keys)}

    def fixed_keys(self) -> set[str]:
        """Return the dotted keys that the config and the overrides set."""
        keys = {parse_override(override)[0] for override in self.overrides}
        tree = read_config_tree(self.config)[0] if self.config else {}
        for section, values in tree.items():
            if isinstance(values, dict):
                keys |= {f"{section}.{name}" for name in values}
            elif values is not None:  # else all lines of the section are comments
                keys.add(section)
        return keys

    def time_budget(self) -> Budget | None:
        """Return the budget asked for, or the default one if nothing else was.

        Raises:
            ConfigError: it is not a duration, or several processes would have to agree on it.
        """
        duration, keys = self.budget, self.fixed_keys()
        sections = {key.partition(".")[0] for key in keys - {"train.from_run"}}
        is_default = self.config is None and sections.isdisjoint(PLANNED_SECTIONS)
        if duration is None and is_default and world_size() == 1:
            duration = DEFAULT_BUDGET
        if duration is None:
            return None
        if world_size() > 1:
            raise ConfigError("--budget plans for one process; give train.max_steps instead")
        if "train.max_steps" not in {parse_override(override)[0] for override in self.overrides}:
            keys -= {"train.max_steps"}  # of a config: the budget takes precedence
        return Budget(parse_duration(duration), keys, self.started)
