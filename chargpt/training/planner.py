"""A text, a device and a time: the size and the steps that promise the lowest loss.

The promise is the law of `plan.json`, which `scripts/fit_plan.py` fits to runs that it records:

    loss = floor + a * parameters^-p + b * fresh^-q             (Hoffmann et al. 2022, eq. 2)

where characters read again count for less and less, the sooner the larger the model is
(`fresh_characters`). How many characters a size gets through is measured on the spot. All that is
chosen goes into the config, so that the run can be repeated without a clock.
"""

import json
import math
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from chargpt.config import Config
from chargpt.device import synchronize
from chargpt.errors import ConfigError
from chargpt.models import count_parameters
from chargpt.text.corpus import SPLITS, Corpus
from chargpt.training.schedule import cooldown_start
from chargpt.training.trainer import Trainer

LEAST_SECONDS = 5
USABLE = 0.93  # share of the time that is planned for training steps at first
LEAST_REFITTED = 1 / 8  # of all steps: when fewer are left, their number stays
REFIT_USABLE = 0.95  # and of what is left, once the real speed is known
TRIAL_STEPS = 3
TRIAL_SHARE = 0.05  # of the time: once measuring has taken it, no larger size is tried
MOST_EPOCHS = 40
DECAY_EPOCHS, LEAST_DECAY = 5, 0.2  # the decay is whole from here on; before, this share at least
# from so many epochs on, times the root of the parameters per character of the text
DROPOUT = ((24, 0.2), (8, 0.1), (0, 0.0))
LEAST_STEPS = 20
SHORT_RUN = 350_000  # characters
BLOCK, SHORT_BLOCK, LEAST_BLOCK = 256, 128, 8
LONG_RUN, VERY_LONG_RUN = 1_000_000, 3_000_000  # characters
COUNTED_UNTIL = 1_200_000  # characters; from there on the share of counted targets falls
LEAST_COUNTED = 0.05
REPEATED, REPEATED_COUNTED = 2, 0.5  # epochs from which on this much of the share stays
EVALUATIONS, FEW_EVALUATIONS = 8, 4  # few in short runs, where each takes the time of two steps
COOLDOWN, LONG_COOLDOWN = 0.6, 0.7  # what comes before it shows the machine's real speed


@dataclass(frozen=True)
class Size:
    """One of the shapes to choose from; its heads are 64 wide or more."""

    n_layer: int
    n_embd: int

    @property
    def n_head(self) -> int:
        """One head for each whole 64 channels."""
        return self.n_embd // 64


SIZES = (
    Size(4, 64),
    Size(4, 96),
    Size(4, 128),
    Size(5, 192),
    Size(6, 256),
    Size(6, 384),
)


def seconds_of(written: str) -> float:
    """Return the seconds of a time such as `90`, `30s`, `3m`, `1m30s` or `2h`.

    Raises:
        ConfigError: it is not a time, or too short to train anything in.
    """
    match = re.fullmatch(r"(?:(\d{1,4})h)?(?:(\d{1,6})m)?(?:(\d{1,8})s?)?", written.strip())
    if not match or not any(match.groups()):
        raise ConfigError(f"the time {written!r:.40} is not like 30s, 3m, 1m30s or 2h; write it so")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = 3600 * hours + 60 * minutes + seconds
    if total < LEAST_SECONDS:
        raise ConfigError(f"{written} is too short to train in; give it {LEAST_SECONDS}s or more")
    return total


def expected_loss(parameters: int, characters: float, text_characters: int) -> float:
    """Return what the law promises on a text like the one that it was fitted to, in nats.

    Args:
        parameters: of the model.
        characters: that it reads in training, repeats included.
        text_characters: in the training split.
    """
    law = _law()
    fresh = fresh_characters(parameters, characters, text_characters, law)
    loss = law["floor"] + law["a"] * parameters ** -law["p"] + law["b"] * fresh ** -law["q"]
    return float(loss)


def fresh_characters(
    parameters: int, characters: float, text_characters: int, law: Mapping[str, float]
) -> float:
    """Return how many characters, each read once, would teach a model as much.

    Repeats are worth less and less, up to R* times the text in all (Muennighoff et al. 2023, eq.
    5). They find 15.4 where a model has few parameters for its text; a larger one knows its text
    sooner, so here R* = r * (characters of the text / parameters)^s.

    Args:
        parameters: of the model.
        characters: that it reads in training, repeats included.
        text_characters: in the training split.
        law: of which r and s count.
    """
    most: float = law["r"] * (text_characters / parameters) ** law["s"]
    repeats = max(0.0, characters / text_characters - 1)
    worth = most * (1 - math.exp(-repeats / most))
    return max(1.0, min(characters, text_characters) * (1 + worth))


@cache
def _law() -> dict[str, float]:
    content = (Path(__file__).parent / "plan.json").read_text(encoding="utf-8")
    law: dict[str, float] = json.loads(content)["law"]
    return law


def settings_for(size: Size, characters: float, corpus: Corpus) -> dict[str, object]:
    """Return the settings that make a run of this size, over about so many characters of a text.

    Short runs gain more from many small updates than they lose by short blocks; long ones lose
    nothing by fewer and larger ones, which take less time. A split holds at least a block and a
    character.
    """
    block_size = SHORT_BLOCK if characters < SHORT_RUN else BLOCK
    while block_size > LEAST_BLOCK and block_size >= min(map(len, map(corpus.split, SPLITS))):
        block_size //= 2
    per_step = 1024 if characters < SHORT_RUN else 2048 if characters < VERY_LONG_RUN else 4096
    return {
        "model.n_layer": size.n_layer,
        "model.n_head": size.n_head,
        "model.n_embd": size.n_embd,
        "model.block_size": block_size,
        "train.batch_size": per_step // block_size,
    }


def length_of(
    config: Config, characters: float, text_characters: int, parameters: int
) -> dict[str, object]:
    """Return the settings that make a run of this config read about so many characters."""
    steps = int(characters / (config.train.batch_size * config.model.block_size))
    steps = max(LEAST_STEPS, steps)
    every = math.ceil(steps / (EVALUATIONS if characters >= SHORT_RUN else FEW_EVALUATIONS))
    epochs, decay = characters / text_characters, config.optim.weight_decay
    memorising = epochs * math.sqrt(parameters / text_characters)
    # what counting teaches is soon learnt; that it is less sure of what was read stays useful
    least = REPEATED_COUNTED if epochs >= REPEATED else 0.0
    counted = config.train.ngram_target_weight * max(least, min(1.0, COUNTED_UNTIL / characters))
    return {
        "train.max_steps": steps,
        "train.evaluate_every": every,
        "train.evaluate_characters": max(4_000, min(30_000, int(characters / 100))),
        "train.save_every": every,
        "train.sample_every": 2 * every if steps >= 200 else 0,  # a sample takes a step's time
        "schedule.cooldown": COOLDOWN if characters < LONG_RUN else LONG_COOLDOWN,
        "train.ngram_target_weight": round(counted, 3) if counted >= LEAST_COUNTED else 0.0,
        "optim.weight_decay": round(decay * min(1.0, max(LEAST_DECAY, epochs / DECAY_EPOCHS)), 4),
        "model.dropout": next(share for least, share in DROPOUT if memorising >= least),
    }


def plan(
    config: Config, given: Collection[str], corpus: Corpus, seconds: float
) -> tuple[Config, str]:
    """Return the config of a run that takes so many seconds from now, and why it is so.

    Args:
        config: what is known so far.
        given: the dotted keys that the user has set, which stay as they are.
        corpus: the text.
        seconds: until the last step is to be done; measuring is part of it.

    Raises:
        ConfigError: the user has also said how many steps to train.
    """
    if "train.max_steps" in given:
        raise ConfigError(
            "--budget and train.max_steps both say how long to train; drop one of them"
        )
    start = time.perf_counter()
    text_characters = len(corpus.split("train"))

    def filled(base: Config, values: dict[str, object]) -> Config:
        return base.with_values({key: v for key, v in values.items() if key not in given})

    def reachable(speed: float) -> float:
        left = USABLE * (seconds - (time.perf_counter() - start))
        return max(1.0, min(left * speed, MOST_EPOCHS * text_characters))  # no time may be left

    own = config.model.kind != "gpt" or any(key.startswith("model.") for key in given)
    best: tuple[float, Config, float, Size] | None = None
    for size in SIZES:
        candidate = config if own else filled(config, settings_for(size, math.inf, corpus))
        parameters = count_parameters(candidate.model, corpus.tokenizer.vocab_size)
        if best is not None:  # what is larger is slower, if less than in proportion
            known = count_parameters(best[1].model, corpus.tokenizer.vocab_size)
            hoped = reachable(best[2] * (known / parameters) ** 0.5)
            if expected_loss(parameters, hoped, text_characters) > best[0]:
                break
        speed = characters_a_second(candidate, corpus)
        loss = expected_loss(parameters, reachable(speed), text_characters)
        if best is not None and loss > best[0]:
            break
        best = loss, candidate, speed, size
        if own or time.perf_counter() - start > TRIAL_SHARE * seconds:
            break
    assert best is not None
    _, chosen, speed, size = best
    if not own:  # now that it is known how much can be read
        measured, chosen = chosen, filled(config, settings_for(size, reachable(speed), corpus))
        if chosen != measured:
            speed = characters_a_second(chosen, corpus)
    parameters = count_parameters(chosen.model, corpus.tokenizer.vocab_size)
    chosen = filled(chosen, length_of(chosen, reachable(speed), text_characters, parameters))
    why = "the model is as you set it" if own else "the largest that pays in this time"
    return chosen, f"{speed:,.0f} characters a second measured; {why}"


def characters_a_second(config: Config, corpus: Corpus) -> float:
    """Return how fast a few training steps are, the first left out, on the text's own targets.

    What counted targets cost, a tenth or less, shows when the steps are fitted to the real speed.
    """
    trainer = Trainer(config, corpus)
    seconds = []
    for step in range(TRIAL_STEPS):
        synchronize(trainer.device)
        start = time.perf_counter()
        trainer.learner.accumulate_gradients(step)
        trainer.learner.clip_gradients()
        trainer.learner.apply_update(step, 1e-6)
        synchronize(trainer.device)
        seconds.append(time.perf_counter() - start)
    return config.train.batch_size * config.model.block_size / min(seconds[1:])


def refit(config: Config, step: int, step_seconds: float, seconds: float) -> Config:
    """Return the config with as many steps as the time left allows, from `step` on.

    A cooldown that has not begun begins here; another goes on at another slope. The rate of the
    steps done stays what it was, to the bit, so the whole run is a function of the new config.

    Args:
        step: steps done.
        step_seconds: what a step takes, all around it included.
        seconds: until the last step is to be done.
    """
    left = max(1, int(REFIT_USABLE * seconds / step_seconds))
    steps, schedule = step + left, config.schedule
    values: dict[str, object] = {"train.max_steps": steps}
    if step <= cooldown_start(schedule, config.train.max_steps) and not schedule.decay_points:
        values["schedule.cooldown"] = left / steps
    else:
        values["schedule.decay_points"] = (
            *schedule.decay_points,
            (step - 1, config.train.max_steps),
        )
    return config.with_values(values)


def next_refit(config: Config, step: int) -> int | None:
    """Return the step after which to fit again, if any.

    That is where the cooldown begins, then half way through what is left, while it is a good part.

    Args:
        step: at which the steps were fitted last, 0 if they never were.
    """
    steps = config.train.max_steps
    if config.schedule.kind != "wsd" or not config.schedule.cooldown:
        return None
    if step == 0:
        return max(2, cooldown_start(config.schedule, steps))
    left = steps - step
    return step + left // 2 if left > max(1, LEAST_REFITTED * steps) else None
