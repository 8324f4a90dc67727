"""Streams and events for a device that does everything in program order."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch


class Stream:
    """Stands for ``torch.cuda.Stream``: all work given to it is already done."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cpu")
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Least and greatest priority, as CUDA reports them."""
        return 0, -1

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, at this moment."""
        recorded = Event() if event is None else event
        recorded.record(self)
        return recorded

    def __enter__(self) -> Stream:
        _entered.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _entered.pop()


class ExternalStream(Stream):
    """Stands for ``torch.cuda.ExternalStream``."""

    def __init__(self, stream_ptr: int = 0, device: Any = None, **_: Any) -> None:
        super().__init__(device)


class Event:
    """Stands for ``torch.cuda.Event``: keeps the wall clock, so that timers stay meaningful."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._recorded_at: float | None = None

    def record(self, stream: Any = None) -> None:
        """Remember the present moment."""
        self._recorded_at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether all work before the event is done: always."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between two recorded events."""
        if self._recorded_at is None or end_event._recorded_at is None:
            raise ValueError("Both events must be recorded before their distance is asked for.")
        return 1000.0 * (end_event._recorded_at - self._recorded_at)


class StreamContext:
    """Stands for ``torch.cuda.stream`` and ``torch.cuda.StreamContext``."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        _entered.append(_entered[-1] if self.stream is None else self.stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
    """Put these classes and functions into ``torch.cuda``."""
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
