"""Signals that terminate the offline tool."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_held() -> Iterator[None]:
    """Defer terminating signals to the end of the block.

    Blocking them does not suffice: another thread that does not block a signal receives it, and
    Python still runs the handler in the main thread.
    """
    deferred: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    handlers = _replace_handlers(deferred)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for late in deferred:
            signal.raise_signal(late)


def _replace_handlers(deferred: list[int]) -> dict[signal.Signals, Any]:
    """Record signals instead, which is possible only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in SIGNALS}
    # Ignored signals stay ignored; None is a handler not installed by Python.
    handlers = {n: h for n, h in found.items() if h is not None and h != signal.SIG_IGN}
    for number in handlers:
        signal.signal(number, lambda number, _: deferred.append(number))
    return handlers
