"""Rates of devices for predicted times: all are modelled, none was measured here."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Device:
    """Achieved rates of one GPU, about 70-85 % of its data sheet.

    Attributes:
        gemm_tflops: bf16 matrix products of a Newton-Schulz iteration.
        training_tflops: Model FLOPs of a whole training step, without attention.
        memory_gb_per_s: Element-wise kernels.
        node_gb_per_s: Data sent by a rank within its node.
        network_gb_per_s: Data sent by a rank to other nodes.
        launch_us: Kernel launch by the host.
        message_us: Latency of an all-to-all.
    """

    gemm_tflops: float
    training_tflops: float
    memory_gb_per_s: float
    node_gb_per_s: float
    network_gb_per_s: float
    launch_us: float = 5.0
    message_us: float = 30.0


_RATES = {
    "a100": (230, 150, 1600, 230, 21),
    "h100": (600, 400, 2700, 350, 42),
    "h200": (620, 420, 3900, 350, 42),
    "b200": (1400, 850, 6400, 700, 42),
    "gb300": (1500, 950, 6400, 700, 85),
}
"""Rates in the order of the fields of ``Device``."""

DEVICES = {
    name: Device(**{field.name: rate for field, rate in zip(fields(Device), rates, strict=False)})
    for name, rates in _RATES.items()
}

CAPABILITIES = {"a100": (8, 0), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0), "gb300": (10, 3)}
"""CUDA compute capability, which determines kernels and dtypes."""


def device_of(name: str, table: str | None = None) -> Device:
    """Return a device, with modelled rates overridden by ``table``, a JSON file of its attributes.

    Raises:
        ValueError: The file cannot be read, a key is unknown or a number is not positive.
    """
    device = DEVICES[name]
    if table is None:
        return device
    known = {field.name for field in fields(Device)}
    source = f"--cost-table {table}"
    try:
        values = json.loads(Path(table).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{source} cannot be read ({error.strerror}): name a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{source} holds no JSON object: write {{{', '.join(sorted(known))}}}")
    if unknown := sorted(set(values) - known):
        raise ValueError(
            f"{source} has the unknown key{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}; "
            f"supported are {', '.join(sorted(known))}"
        )
    for key, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < float("inf"):
            raise ValueError(f"{source}: {key} is {value!r}; it must be a number above 0")
    return replace(device, **values)
