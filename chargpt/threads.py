"""Choice of the number of CPU threads by measurement.

OpenMP's threads spin while they wait for each other. If another process takes one of their cores,
every parallel operation waits for the delayed thread, and two threads can be ten times slower than
one. PyTorch can change the number of threads at any time, but not how they wait.
"""

import os
import time
from functools import cache

import torch
import torch.nn.functional as F

N_ROUNDS = 16
ROUNDS_BEFORE_DROPPING = 5  # after which slow numbers of threads are not tried again
MIN_GAIN = 1.25  # by which more threads must be faster: on a busy machine their speed varies
MIN_SPEED = 0.5  # fraction of the highest speed: below it, threads are chosen again
RETRY_SECONDS = 20.0  # after which more threads are tried again


def choose_threads(max_threads: int) -> int:
    """Time small operations with `max_threads` threads, half as many, ..., 1; set the best number.

    Starting at one thread, a larger number replaces the chosen one if it is MIN_GAIN times as fast.
    Returns the chosen number. This takes about 0.1 s on an idle machine.
    """
    x, weight = torch.ones(2048, 128), torch.ones(128, 512)
    seconds = {max_threads >> n: 0.0 for n in range(max_threads.bit_length())}
    for number in range(N_ROUNDS):
        for threads in seconds:
            torch.set_num_threads(threads)
            start = time.perf_counter()
            F.silu(x @ weight)
            x.softmax(dim=-1)
            if number:  # the first round is a warm-up
                seconds[threads] += time.perf_counter() - start
        if number >= ROUNDS_BEFORE_DROPPING:
            limit = 2 * min(seconds.values())
            seconds = {threads: total for threads, total in seconds.items() if total <= limit}
    best = min(seconds)
    for threads in sorted(seconds):
        if seconds[threads] * MIN_GAIN < seconds[best]:
            best = threads
    torch.set_num_threads(best)
    return best


@cache
def default_threads() -> int:
    """Return PyTorch's number of threads at the first call, before a run has set another."""
    return torch.get_num_threads()


def tune_threads(device: torch.device) -> None:
    """Set the fastest number of threads, unless this process has measured or set it before."""
    if not default_threads.cache_info().currsize:
        measure_threads(device)


def measure_threads(device: torch.device) -> int | None:
    """Set the fastest number of threads and return it; None if it does not matter or is set."""
    if device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    return choose_threads(default_threads())


class ThreadTuner:
    """Chooses threads again when the speed of training falls, and later tries more of them."""

    def __init__(self, max_threads: int) -> None:
        self.max_threads = max_threads
        self.highest_speed = 0.0
        self.checked = time.perf_counter()

    def update(self, speed: float) -> int | None:
        """Choose again if that is due at a measured speed; return the number if it changed."""
        self.highest_speed = max(self.highest_speed, speed)
        is_reduced = torch.get_num_threads() < self.max_threads
        waited = time.perf_counter() - self.checked
        if speed > MIN_SPEED * self.highest_speed and not (is_reduced and waited > RETRY_SECONDS):
            return None
        self.highest_speed, self.checked = speed, time.perf_counter()
        before = torch.get_num_threads()
        threads = choose_threads(self.max_threads)
        return None if threads == before else threads
