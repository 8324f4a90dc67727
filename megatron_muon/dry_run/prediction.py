"""Predicts times of optimizer steps, and derives recommendations. Every time is modelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_muon.dry_run.devices import Device
from megatron_muon.dry_run.upstream import MODES
from megatron_muon.placement import MOST_SPLIT_RANKS

# Bytes of memory traffic per element: gradient, masters, state, update and weight.
_ADAM_TRAFFIC = 30
_MATRIX_TRAFFIC = 30
_PASSES_OF_ITERATION = 24
"""Kernels of one matrix of megatron-core's muon: 15 products, norm, casts, momentum, weight."""

Stage = Mapping[str, Any]


def predict(stages: Sequence[Stage], device: Device, world_size: int) -> dict[str, Any]:
    """Predict milliseconds of the optimizer step in the slowest stage, and percent over AdamW."""
    names = ("adamw", "ours", *(f"muon_{mode}" for mode in MODES))
    times = {
        name: 1e3 * max(sum(_seconds(name, g, device) for g in stage["groups"]) for stage in stages)
        for name in names
    }
    gathers = {
        name: 1e3 * max(sum(_gather(name, g, device) for g in stage["groups"]) for stage in stages)
        for name in names
    }
    seen = {n: times[n] + (0 if stages[0]["overlaps_gather"] else gathers[n]) for n in names}
    step = 1e3 * _training_seconds(stages, device, world_size)
    parts: dict[str, float] = {}
    slowest = max(stages, key=lambda s: sum(_seconds("ours", g, device) for g in s["groups"]))
    for group in slowest["groups"]:
        for key, value in _parts(group, device).items():
            parts[key] = parts.get(key, 0.0) + 1e3 * value
    return {
        "modelled": True,
        "optimizer_ms": times,
        "gather_ms": gathers,
        "gather_is_overlapped": stages[0]["overlaps_gather"],
        "ours_ms": parts,
        "training_ms_without_optimizer": step,
        "percent_over_adamw": {
            name: 100 * (time - seen["adamw"]) / (step + seen["adamw"])
            for name, time in seen.items()
        },
    }


def _parts(group: Mapping[str, Any], device: Device) -> dict[str, float]:
    """Return the seconds of each part of our step, as if executed sequentially."""
    return {
        "elementwise": (
            group["held_elements"] * _MATRIX_TRAFFIC + group["adam_elements"] * _ADAM_TRAFFIC
        )
        / (1e9 * device.memory_gb_per_s),
        "products": group["flops_max"] / (1e12 * device.gemm_tflops),
        "exchange": max(
            group["sent_bytes_in_node"] / (1e9 * device.node_gb_per_s),
            group["sent_bytes_over_network"] / (1e9 * device.network_gb_per_s),
        )
        + group["messages"] * 1e-6 * device.message_us,
        "launches": group["launches"] * 1e-6 * device.launch_us,
    }


def _seconds(name: str, group: Mapping[str, Any], device: Device) -> float:
    adam: float = group["adam_elements"] * _ADAM_TRAFFIC / (1e9 * device.memory_gb_per_s)
    if name == "adamw":
        held: float = group["held_elements"] * _ADAM_TRAFFIC / (1e9 * device.memory_gb_per_s)
        return adam + held
    if name == "ours":
        parts = _parts(group, device)
        less, more = sorted((parts["products"], parts["exchange"]))
        # Waves are exchanged while others are computed: only the first of the shorter is exposed.
        waves: int = max(1, group["waves"])
        return max(parts["elementwise"] + more + less / waves, parts["launches"])
    load = group["upstream"][name.removeprefix("muon_")]
    on_device: float = (
        load["elements"] * _MATRIX_TRAFFIC / (1e9 * device.memory_gb_per_s)
        + load["flops"] / (1e12 * device.gemm_tflops)
        + load["tp_bytes"] / (1e9 * device.node_gb_per_s)
    )
    launches: float = load["matrices"] * _PASSES_OF_ITERATION * 1e-6 * device.launch_us
    return adam + max(on_device, launches)


def _gather(name: str, group: Mapping[str, Any], device: Device) -> float:
    """Return the seconds of the weights' all-gather, as rings over all links of a node."""
    dp, near = group["dp"], group["dp_ranks_on_a_node"]
    size: float = group["gathered_bytes"]
    if name.startswith("muon_"):
        size *= 1 + padding(group)
    rate = device.node_gb_per_s
    if near < dp:
        rate = min(rate, near * device.network_gb_per_s)
    return float(size * (dp - 1) / dp / (1e9 * rate))


def padding(group: Mapping[str, Any]) -> float:
    """Return the padding of megatron-core's layer-wise layout relative to the matrices."""
    added: float = next(iter(group["upstream"].values()))["padding_elements"]
    return float(added * group["tp"] / group["elements"]) if group["elements"] else 0.0


def _training_seconds(stages: Sequence[Stage], device: Device, world_size: int) -> float:
    """Return the seconds of forward and backward: 6 FLOPs per active element and token."""
    active = stages[0]["output_elements"]
    for stage in stages:
        for group in stage["groups"]:
            is_expert = group["domain"] == "expert"
            active += (
                group["elements"] * group["groups_in_stage"] * stage["active_experts"]
                if is_expert
                else group["elements"]
            )
    return float(6 * active * stages[0]["tokens"] / (world_size * 1e12 * device.training_tflops))


def recommendations(
    stages: Sequence[Stage], settings: Any, prediction: Mapping[str, Any]
) -> list[str]:
    """Return recommended changes with their reasons."""
    found = []
    groups = [group for stage in stages for group in stage["groups"] if group["matrices"]]
    dmuon = settings.optimizer == "dmuon"
    if dmuon and settings.split_ranks is not None and settings.split_ranks < MOST_SPLIT_RANKS:
        found += _split_more(groups, settings)
    expensive = [g for g in groups if g["sent_bytes"] > g["dmuon_sent_bytes"]]
    few_factors = [g for g in groups if not dmuon and 2 * g["by_factors"] < g["matrices"]]
    if not dmuon and (expensive or few_factors):
        worst = max(
            expensive or few_factors, key=lambda g: g["sent_bytes"] / max(1, g["dmuon_sent_bytes"])
        )
        found.append(
            "fewer, larger gradient buckets (--ddp-num-buckets 1 to 4, or a larger "
            f"--ddp-bucket-size): only {worst['by_factors']} of {worst['matrices']} "
            f"{worst['domain']} matrices are exchanged as factors, since small buckets split each "
            f"over many ranks; {worst['sent_bytes'] / max(1, worst['dmuon_sent_bytes']):.2f} x "
            "dmuon's bytes are sent. A bucket of size ranks x matrix keeps whole rows on a rank"
        )
    parts = prediction["ours_ms"]
    costs = {key: parts[key] for key in ("products", "exchange", "launches")}
    largest = max(costs, key=lambda key: costs[key])
    if dmuon and largest == "exchange":
        found.append(
            f"the exchange dominates ({costs['exchange']:.1f} ms, products "
            f"{costs['products']:.1f} ms): more tensor or expert parallelism inside a node, or "
            "--optimizer orth_dion with a small rank, sends less over the network"
        )
    if largest == "launches":
        found.append(
            f"kernel launches dominate ({costs['launches']:.1f} ms): a larger "
            "--matrix-exchange-buffer-mb allows larger batches"
        )
    return found or ["nothing to change: no setting is predicted to be faster by 10 %"]


def _split_more(groups: Sequence[Mapping[str, Any]], settings: Any) -> list[str]:
    """Advise where even the smallest allowed part of the largest matrix exceeds the mean load."""
    bound = settings.split_ranks
    limited = [
        g
        for g in groups
        if g["largest_matrix_flops"] > 1.1 * bound * g["flops_mean"]
        and g["largest_matrix_flops"] >= settings.split_min_gflop * 1e9
        and g["tp"] * g["dp"] > bound
    ]
    if not limited:
        return []
    worst = max(limited, key=lambda g: g["largest_matrix_flops"])
    advice = (
        f"--dmuon-split-ranks auto: one {worst['domain']} matrix is "
        f"{worst['largest_matrix_flops'] / 1e12:.3g} TFLOP and the mean of its "
        f"{worst['tp'] * worst['dp']} ranks {worst['flops_mean'] / 1e12:.3g}; "
        f"--dmuon-split-ranks {bound} prevents more ranks from sharing it"
    )
    return [advice]
