"""Streams and events for a device that executes in program order."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stream:
    """Replaces ``torch.cuda.Stream``; its work is always complete."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cpu")
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return CUDA's lowest and highest priority."""
        return 0, -1

    def wait_stream(self, stream: Any) -> None:
        """Return immediately."""

    def wait_event(self, event: Any) -> None:
        """Return immediately."""

    def synchronize(self) -> None:
        """Return immediately."""

    def query(self) -> bool:
        """Return True: all work is complete."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, now."""
        recorded = Event() if event is None else event
        recorded.record(self)
        return recorded

    def __enter__(self) -> Stream:
        _entered.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _entered.pop()


class ExternalStream(Stream):
    """Replaces ``torch.cuda.ExternalStream``."""

    def __init__(self, stream_ptr: int = 0, device: Any = None, **_: Any) -> None:
        super().__init__(device)


class Event:
    """Replaces ``torch.cuda.Event``; records wall-clock time, so that timers stay meaningful."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._recorded_at: float | None = None

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        self._recorded_at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return immediately."""

    def synchronize(self) -> None:
        """Return immediately."""

    def query(self) -> bool:
        """Return True: all work before the event is complete."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between two recorded events."""
        if self._recorded_at is None or end_event._recorded_at is None:
            raise ValueError("Both events must be recorded before elapsed_time is called.")
        return 1000.0 * (end_event._recorded_at - self._recorded_at)


class StreamContext:
    """Replaces ``torch.cuda.stream`` and ``torch.cuda.StreamContext``."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        _entered.append(_entered[-1] if self.stream is None else self.stream)

    def __exit__(self, *_: Any) -> None:
        _entered.pop()


_default = Stream()
# The innermost stream entered is last; ``set_stream`` replaces it.
_entered: list[Stream] = [_default]


def _current_stream(device: Any = None) -> Stream:
    return _entered[-1]


def _default_stream(device: Any = None) -> Stream:
    return _default


def _set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _entered[-1] = stream


def _stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def install() -> None:
    """Install these classes and functions in ``torch.cuda``."""
    replacements: dict[str, Any] = {
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": _stream,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "set_stream": _set_stream,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
