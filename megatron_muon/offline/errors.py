"""What the offline tools raise."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint that cannot be read, converted or written; its text is one sentence."""
