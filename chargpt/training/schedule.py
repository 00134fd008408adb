"""The learning rate as a pure function of the step."""

import math

from chargpt.config import ScheduleConfig


def rate_at(step: int, schedule: ScheduleConfig, max_steps: int) -> float:
    """Return what the learning rate is multiplied with in update `step` (0, 1, ...), in (0, 1].

    Both kinds rise linearly over `warmup` steps. The trapezoid then stays at 1 and falls linearly
    towards 0 over the last `cooldown` share of all steps; the cosine falls from there to a tenth
    (Loshchilov and Hutter 2017, section 3, without restarts).
    """
    rise = min(1.0, (step + 1) / (schedule.warmup + 1))
    if schedule.kind == "cosine":
        span = max(1, max_steps - schedule.warmup)
        done = min(1.0, max(0, step - schedule.warmup) / span)
        return rise * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
    cooldown_steps = round(schedule.cooldown * max_steps)
    fall = (max_steps - step) / (cooldown_steps + 1) if cooldown_steps else 1.0
    return min(rise, fall, 1.0)
