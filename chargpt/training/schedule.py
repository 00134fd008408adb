"""The learning rate as a pure function of the step."""

import math

from chargpt.config import ScheduleConfig


def rate_at(step: int, schedule: ScheduleConfig, max_steps: int) -> float:
    """Return what the learning rate is multiplied with in update `step` (0, 1, ...), in (0, 1].

    Both kinds rise linearly over `warmup` steps. `wsd` then stays at 1 and decays linearly towards
    0 over the last `cooldown` fraction of all steps, re-planned at each of `decay_points`; the
    cosine decays to a tenth (Loshchilov and Hutter 2017, section 3, no restarts).
    """
    rise = min(1.0, (step + 1) / (schedule.warmup + 1))
    if schedule.kind == "cosine":
        span = max(1, max_steps - schedule.warmup)
        done = min(1.0, max(0, step - schedule.warmup) / span)
        return rise * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
    return min(rise, _fall(step, schedule, max_steps))


def cooldown_start(schedule: ScheduleConfig, max_steps: int) -> int:
    """Return how many steps the wsd does before its rate begins to fall."""
    planned = schedule.decay_points[0][1] if schedule.decay_points else max_steps
    return planned - round(schedule.cooldown * planned)


def _fall(step: int, schedule: ScheduleConfig, max_steps: int) -> float:
    """Return the height of the wsd, were there no warm-up."""
    height, start = 1.0, cooldown_start(schedule, max_steps) - 1
    if step <= start:
        return 1.0
    for until, end in schedule.decay_points:
        if step <= until:
            break
        height *= (end - until) / (end - start)
        start = until
    else:
        end = max_steps
    return height * (end - step) / (end - start)
