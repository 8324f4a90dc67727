"""Progress reports on the error stream."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class ProgressReport:
    """Prints the completed fraction of a number of bytes, on a terminal in one updated line."""

    def __init__(self, total: int, stream: TextIO = sys.stderr) -> None:
        self._total, self._done = max(total, 1), 0
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._interval = 0.1 if self._is_terminal else 10.0
        self._started = self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        """Add to the number of completed bytes."""
        self._done += count
        if time.monotonic() - self._last >= self._interval:
            self._last = time.monotonic()
            self._print()

    def finish(self) -> None:
        """Print completion."""
        self._done = self._total
        self._print()
        if self._is_terminal:
            self._stream.write("\n")

    def _print(self) -> None:
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = self._done / seconds / 1e6
        share = min(self._done / self._total, 1.0)
        text = f"{share:6.1%} of {self._total:,} bytes, {rate:,.0f} MB/s"
        self._stream.write(f"\r{text}" if self._is_terminal else f"{text}\n")
        self._stream.flush()
