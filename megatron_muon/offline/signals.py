"""Signals that end a run of the offline tool."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_held() -> Iterator[None]:
    """Let signals that end a run wait for the end of the block.

    Blocking them is not enough: in a process with several threads one that does not block a signal
    gets it, and Python runs the handler in the main thread all the same.
    """
    came: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    handlers = _replace_handlers(came)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for late in came:
            signal.raise_signal(late)


def _replace_handlers(came: list[int]) -> dict[signal.Signals, Any]:
    """Note signals instead; only the main thread can have that."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in SIGNALS}
    # What is ignored stays so, and None is a handler that is not Python's.
    handlers = {n: h for n, h in found.items() if h is not None and h != signal.SIG_IGN}
    for number in handlers:
        signal.signal(number, lambda number, _: came.append(number))
    return handlers
