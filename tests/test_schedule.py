"""The learning rate over the steps."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chargpt.config import ScheduleConfig
from chargpt.training.optim import lr_factor_at

schedules = st.builds(
    ScheduleConfig,
    kind=st.sampled_from(["wsd", "cosine"]),
    warmup=st.integers(0, 500),
    cooldown=st.floats(0, 1),
    decay_points=st.lists(
        st.tuples(st.integers(0, 500), st.integers(1, 500)),
        max_size=4,
        unique_by=lambda point: point[0],
    ).map(lambda decay_points: tuple(sorted((step, step + more) for step, more in decay_points))),
)


def rates(max_steps: int, **values: object) -> list[float]:
    schedule = ScheduleConfig(**values)  # type: ignore[arg-type]
    return [lr_factor_at(step, schedule, max_steps) for step in range(max_steps)]


@settings(deadline=None)
@given(schedules, st.integers(1, 300))
def test_the_factor_rises_to_one_peak_and_then_never_rises(
    schedule: ScheduleConfig, max_steps: int
) -> None:
    values = [lr_factor_at(step, schedule, max_steps) for step in range(max_steps)]
    assert all(0 < value <= 1 for value in values)
    peak = values.index(max(values))
    assert all(a <= b + 1e-12 for a, b in pairwise(values[: peak + 1]))
    assert all(a >= b - 1e-12 for a, b in pairwise(values[peak:]))


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_a_restart_ends_the_schedule_before_it_and_warms_up_to_its_fraction(kind: str) -> None:
    restarts = ((100, 0.5), (160, 0.25))
    values = rates(200, kind=kind, warmup=4, cooldown=0.6, restarts=restarts)
    assert values[:100] == rates(100, kind=kind, warmup=4, cooldown=0.6)
    assert max(values[100:160]) == pytest.approx(0.5 * 56 / 60)
    assert values[100] == pytest.approx(0.5 / 5)
    assert values[159] == pytest.approx(0.5 / 60)
    assert max(values[160:]) <= 0.25
    assert values[-1] == pytest.approx(0.25 / 40)


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_the_decay_after_a_restart_can_be_replanned(kind: str) -> None:
    schedule = {"kind": kind, "warmup": 4, "restarts": ((100, 0.5),)}
    before = rates(200, **schedule)
    after = rates(250, **schedule, decay_points=((149, 200),))
    assert after[:150] == before[:150]
    differences = [a - b for a, b in pairwise(after[149:])]
    assert differences == pytest.approx([before[149] / 101] * 100)


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_the_warmup_is_linear_and_ends_at_the_full_rate(kind: str) -> None:
    values = rates(1000, kind=kind, warmup=9, cooldown=0.5)
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates(10, kind=kind, warmup=0, cooldown=0.0)[0] == 1.0
    short = rates(5, kind=kind, warmup=20, cooldown=0.0)  # it only rises
    assert short == pytest.approx([(step + 1) / 21 for step in range(5)])


def test_the_decay_is_linear_and_ends_near_zero() -> None:
    values = rates(1000, warmup=0, cooldown=0.4)
    assert values[:600] == [1.0] * 600
    differences = [a - b for a, b in pairwise(values[600:])]
    assert differences == pytest.approx([1 / 401] * 399)
    assert values[-1] == pytest.approx(1 / 401)
    assert rates(50, warmup=0, cooldown=0.0) == [1.0] * 50


def test_the_cosine_passes_055_half_way_and_ends_at_a_tenth() -> None:
    values = rates(1001, kind="cosine", warmup=0)
    assert values[500] == pytest.approx(0.55, abs=1e-3)
    assert values[-1] == pytest.approx(0.1, abs=1e-4)
