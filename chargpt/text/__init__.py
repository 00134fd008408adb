"""Text in, token arrays out. Imports nothing of the models."""

from collections.abc import Callable

TextProgress = Callable[[str, int, int], None]
"""Called with the stage's name, the bytes done and the bytes in all (0 if unknown)."""
