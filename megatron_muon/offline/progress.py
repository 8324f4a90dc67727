"""A bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 30
LINE_SECONDS = 10.0
BAR_SECONDS = 0.1


class ProgressReport:
    """Tells how many of all bytes are done.

    Args:
        total: Bytes in all.
        stream: Where it is told; a bar if that is a terminal.
    """

    def __init__(self, total: int, stream: TextIO = sys.stderr) -> None:
        self._total = max(total, 1)
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._start = time.monotonic()
        self._last = self._start if not self._is_terminal else 0.0

    def __call__(self, done: int) -> None:
        """So many bytes are done."""
        now = time.monotonic()
        if now - self._last >= (BAR_SECONDS if self._is_terminal else LINE_SECONDS):
            self._last = now
            self._tell(done)

    def finish(self) -> None:
        """Tell that all is done."""
        self._tell(self._total)
        if self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _tell(self, done: int) -> None:
        share = min(done / self._total, 1.0)
        seconds = max(time.monotonic() - self._start, 1e-9)
        text = f"{share:6.1%} of {self._total:,} bytes, {done / seconds / 1e6:,.0f} MB/s"
        if self._is_terminal:
            bar = "#" * round(share * WIDTH)
            self._stream.write(f"\r[{bar:{WIDTH}}] {text}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()
