"""Learning-rate schedule as a pure function of the step."""

import math

from chargpt.config import ScheduleConfig

COSINE_FLOOR = 0.1  # factor that the cosine approaches


def lr_factor_at(step: int, schedule: ScheduleConfig, max_steps: int) -> float:
    """Return the factor on every learning rate in update `step` (0, 1, ...), in (0, 1].

    The factor warms up linearly over `warmup` steps. With `wsd` (warmup, stable, decay) it then
    stays at 1 and decays linearly towards 0 over the last `cooldown` fraction of all steps,
    re-planned at each of `decay_points`. With `cosine` it falls to a tenth along a half cosine
    (Loshchilov and Hutter 2017, section 3, one cycle). Both end at `max_steps`, or at the first of
    `restarts`. After each restart the factor warms up to the restart's fraction and decays linearly
    towards 0 at the next one or the end.
    """
    start, peak = 0, 1.0
    for at, fraction in schedule.restarts:
        if step < at:
            max_steps = at
            break
        start, peak = at, fraction
    warmup = min(1.0, (step - start + 1) / (schedule.warmup + 1))
    if start:
        return peak * min(warmup, (max_steps - step) / (max_steps - start))
    if schedule.kind == "cosine":
        span = max(1, max_steps - schedule.warmup)
        progress = min(1.0, max(0, step - schedule.warmup) / span)
        amplitude = (1 - COSINE_FLOOR) / 2
        return warmup * (COSINE_FLOOR + amplitude * (1 + math.cos(math.pi * progress)))
    return min(warmup, _decay_factor(step, schedule, max_steps))


def decay_start(schedule: ScheduleConfig, max_steps: int) -> int:
    """Return the number of steps before the decay of `wsd` begins."""
    planned = schedule.decay_points[0][1] if schedule.decay_points else max_steps
    return planned - round(schedule.cooldown * planned)


def _decay_factor(step: int, schedule: ScheduleConfig, max_steps: int) -> float:
    """Return the factor of `wsd` without its warmup."""
    factor, start = 1.0, decay_start(schedule, max_steps) - 1
    if step <= start:
        return 1.0
    # each pair is a straight line towards zero at `end`, followed up to the step `until`
    for until, end in (*schedule.decay_points, (max_steps, max_steps)):
        if step <= until:
            return factor * (end - step) / (end - start)
        factor *= (end - until) / (end - start)
        start = until
    return 0.0
