"""Signals that terminate the offline tool."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with handled_by(lambda number, _: deferred.append(number)) if is_main else nullcontext():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for late in deferred:
            signal.raise_signal(late)


@contextmanager
def handled_by(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Install a handler and restore the previous ones; ignored signals (nohup) stay ignored."""
    found = {number: signal.getsignal(number) for number in SIGNALS}
    # None is a handler not installed by Python.
    previous = {n: h for n, h in found.items() if h is not None and h != signal.SIG_IGN}
    for number in previous:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
