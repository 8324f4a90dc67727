"""Formats the report of a dry run as text, and plots load and memory of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_muon.dry_run.prediction import padding

MIB, GIB = 2**20, 2**30


def render(report: Mapping[str, Any]) -> str:
    """Return the data of ``--json`` as text."""
    title = (
        f"dry run: {report['world_size']} ranks, {report['ranks_per_node']} per node; "
        f"one rank of each of {len(report['stages'])} pipeline stages"
    )
    lines = [
        title,
        f"layers and kernels were replaced by local ones: {' '.join(report['flags_set'])}"
        + (f"; removed: {' '.join(removed)}" if (removed := report["flags_removed"]) else ""),
        *report["stand_ins"],
        "",
        report["table_at_start"],
    ]
    lines += [
        f"rule {pattern} matches only experts of ranks that were not run"
        for pattern in report["rules_of_other_experts"]
    ]
    for numbers, group in _alike(report["stages"]):
        lines += ["", *_group(numbers, group)]
    lines += ["", *_prediction(report), "", "recommended:"]
    return "\n".join([*lines, *(f"  {text}" for text in report["recommendations"])])


def _alike(stages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield distinct groups with the stages that contain them; every stage was run."""
    found: list[tuple[list[int], Mapping[str, Any], Mapping[str, Any]]] = []
    for number, stage in enumerate(stages):
        for group in stage["groups"]:
            facts = group | {"memory": group["memory"] | {"rank": None}}
            same = next((entry for entry in found if entry[1] == facts), None)
            if same is None:
                found.append(([number], facts, group))
            else:
                same[0].append(number)
    for numbers, _, group in found:
        yield f"stage {numbers[0]}" if len(numbers) == 1 else _span(numbers), group


def _span(numbers: Sequence[int]) -> str:
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"stages {numbers[0]}-{numbers[-1]}, each"
    return f"stages {', '.join(map(str, numbers))}, each"


def _group(stages: str, group: Mapping[str, Any]) -> Iterator[str]:
    ranks, memory = group["tp"] * group["dp"], group["memory"]
    title = f"{stages}, {group['domain']}: TP {group['tp']} x DP {group['dp']}"
    others = group["groups_in_stage"]
    yield title + (f", one of {others} equal exchange groups" if others > 1 else "")
    yield (
        f"  matrices    {group['matrices']} on {group['owners']} of {ranks} ranks, "
        f"{group['split_matrices']} split, {group['by_factors']} by factors, {group['waves']} waves"
    )
    yield (
        f"  TFLOP       {group['flops_max'] / 1e12:.4g} at most, {group['flops_mean'] / 1e12:.4g} "
        f"mean; load max/mean {group['balance']:.3f}, lower bound "
        f"{group['balance_bound']:.3f}"
    )
    yield (
        f"  exchange    {group['sent_bytes'] / MIB:.1f} MiB sent by the busiest rank: "
        f"{group['sent_bytes_in_node'] / MIB:.1f} in its node, "
        f"{group['sent_bytes_over_network'] / MIB:.1f} over the network; "
        f"{group['messages']} messages, {group['peers']} peers"
    )
    yield f"  host        {group['launches']} kernel launches, {group['host_reads']} host reads"
    kinds = {
        key: value
        for key, value in memory.items()
        if key not in ("rank", "step", "step_planned") and value
    }
    yield (
        f"  memory      rank {memory['rank']}, GiB: "
        + ", ".join(
            f"{key.replace('_', ' ')} {value / GIB:.3f}"
            for key, value in (kinds | {"optimizer step": memory["step"]}).items()
        )
        + f" (counted; planned {memory['step_planned'] / GIB:.3f})"
    )
    error = group["counted_against_plan"]
    if error["sent_bytes"]:
        yield f"  ERROR       the step sends {error['sent_bytes']:+d} bytes against the plan"
    for what in ("flops", "memory"):
        percent = error[f"{what}_percent"]
        if percent is not None and abs(percent) > 10 and group["matrices"]:
            yield f"  ERROR       {what} counted: {percent:+.1f} % against the plan"


def _prediction(report: Mapping[str, Any]) -> Iterator[str]:
    found = report["prediction"]
    yield (
        f"modelled, not measured, on {report['gpu']} ("
        + ", ".join(f"{key} {value:g}" for key, value in report["device"].items())
        + "):"
    )
    over = found["percent_over_adamw"]
    for name, time in found["optimizer_ms"].items():
        label = {"adamw": "AdamW", "ours": report["optimizer"]}.get(
            name, f"megatron-core {name.replace('_', ', ')}"
        )
        padded = ""
        if name.startswith("muon_"):
            most = max(padding(g) for stage in report["stages"] for g in stage["groups"])
            padded = f"; buffers and gather padded by up to {100 * most:.0f} %"
        against = "" if name == "adamw" else f", training step {over[name]:+.2f} % over AdamW's"
        yield (
            f"  {label:32} {time:9.2f} ms and gather {found['gather_ms'][name]:.2f} ms"
            f"{against}{padded}"
        )
    if found["gather_is_overlapped"]:
        yield "  the gather of weights is hidden by the next forward (--overlap-param-gather)"
    yield "  ours, if executed sequentially: " + ", ".join(
        f"{key} {value:.2f} ms" for key, value in found["ours_ms"].items()
    )


def plot(report: Mapping[str, Any], path: str) -> None:
    """Plot load and memory of every rank; the suffix of the path selects the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(_alike(report["stages"]))
    figure, axes = pyplot.subplots(
        len(groups), 2, figsize=(12, 2.4 * len(groups)), squeeze=False, layout="constrained"
    )
    for row, (stages, group) in zip(axes, groups, strict=True):
        for axis, key, unit, name in (
            (row[0], "flops_of_ranks", 1e12, "TFLOP"),
            (row[1], "memory_of_ranks", GIB, "state and step, GiB"),
        ):
            values = [value / unit for value in group[key]]
            axis.stairs(values, fill=True)
            axis.axhline(sum(values) / len(values), color="black", linewidth=0.8)
            axis.set_title(f"{stages}, {group['domain']}: {name}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("rank in the exchange group (line: mean)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
