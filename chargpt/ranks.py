"""What `torchrun` tells a process in environment variables: its rank and the world size."""

import os

from chargpt.errors import DeviceError


def world_size() -> int:
    """Return the number of ranks that `torchrun` started; 1 without it."""
    return max(1, _number("WORLD_SIZE", 1))


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return _number("LOCAL_RANK", 0)


def is_main_rank() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return world_size() == 1 or _number("RANK", 0) == 0


def _number(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise DeviceError(
            f"the environment variable {name} is {text!r:.40}, not the number that `torchrun` "
            "sets; unset it"
        )
    return int(text)
