"""The exception of the offline tool."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(Exception):
    """A checkpoint that cannot be read, converted or written; its text is one sentence."""


def and_more(names: Sequence[str]) -> str:
    """The first name and the number of others, as a part of a sentence."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
