"""A bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 30
LINE_SECONDS = 10.0
BAR_SECONDS = 0.1


class ProgressReport:
    """Counts bytes and prints how many of all are done.

    Args:
        total: Bytes in all.
        stream: Where it is printed; a bar if that is a terminal.
    """

    def __init__(self, total: int, stream: TextIO = sys.stderr) -> None:
        self._total, self._done = max(total, 1), 0
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._start = time.monotonic()
        self._last = self._start if not self._is_terminal else 0.0

    def __call__(self, count: int) -> None:
        """Add so many bytes."""
        self._done += count
        now = time.monotonic()
        if now - self._last >= (BAR_SECONDS if self._is_terminal else LINE_SECONDS):
            self._last = now
            self._print()

    def finish(self) -> None:
        """Print that all is done."""
        self._done = self._total
        self._print()
        if self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _print(self) -> None:
        share = min(self._done / self._total, 1.0)
        seconds = max(time.monotonic() - self._start, 1e-9)
        text = f"{share:6.1%} of {self._total:,} bytes, {self._done / seconds / 1e6:,.0f} MB/s"
        if self._is_terminal:
            bar = "#" * round(share * WIDTH)
            self._stream.write(f"\r[{bar:{WIDTH}}] {text}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()
