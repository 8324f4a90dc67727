"""The exception of the offline tool, and parts of its sentences."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(Exception):
    """A checkpoint that cannot be read, converted or written; its text is one sentence."""


def and_more(names: Sequence[str]) -> str:
    """Return the first name and the number of others."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def first_line(error: BaseException) -> str:
    """Return the reason of an error in one line."""
    text = getattr(error, "strerror", None) or str(error)
    return text.splitlines()[0] if text else type(error).__name__
