"""Time of one optimizer step: dmuon, megatron-core's own muon, and AdamW, measured in one run.

Real megatron-core on four CPU ranks over gloo, as TP4 and as TP2 × DP2, one thread per rank, all
arithmetic in fp32. Within a layout every optimizer has a copy of the same model in the same
processes, gets the same gradients before every step, and takes its turn in every round.

    make benchmark        (or: .venv/bin/python tools/first_comparison.py [--quick])

Writes to benchmark_output/: first_comparison.md, first_comparison.json, first_comparison.png.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial, wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before torch is imported: its thread pools neither survive a fork nor help several ranks a core.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "benchmark_output"
sys.path.insert(0, str(ROOT))

from tests import tiny_gpt  # noqa: E402
from tests.ranks import layout, run_ranks  # noqa: E402
from tests.reference.muon import QUINTIC, ReferenceMuon, gate_up_parts, qkv_parts  # noqa: E402

RANKS = 4
# Llama-shaped layers. Four query groups, so that TP4 cuts QKV between groups: where it cuts through
# a group, megatron-core's muon leaves QKV unsplit and would be another optimizer.
HIDDEN, HEADS, GROUPS, FFN = 512, 16, 4, 2048
VOCAB, SEQUENCE, SEQUENCES = 512, 128, 8
LR, WEIGHT_DECAY, MOMENTUM, STEPS, SCALE_MODE = 1e-2, 0.1, 0.9, 5, "spectral"

# On a slow or busy machine there are fewer rounds, so that the whole run ends within minutes.
ROUNDS, MIN_ROUNDS, BUDGET_S = 7, 3, 110.0

LAYER = "decoder.layers.0."
CHECKED = tuple(
    LAYER + name
    for name in (
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    )
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to spread the model over the ranks."""

    name: str
    tp: int


LAYOUTS = (Layout(name="TP4", tp=4), Layout(name="TP2 × DP2", tp=2))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One optimizer.

    Attributes:
        key: Name in the JSON file.
        label: Name in the table.
        fused_gate_up: Whether it takes gate and up as one matrix; None if it has no matrices.
        build: Gives (wrapped model, optimizer).
    """

    key: str
    label: str
    fused_gate_up: bool | None
    build: Callable[[Any], tuple[Any, Any]]


@dataclass(kw_only=True)
class Measurement:
    """What one optimizer did in one layout, the slowest or busiest rank of each step."""

    label: str
    seconds: list[float] = field(default_factory=list)
    gflop_max: float = 0.0
    gflop_mean: float = 0.0
    sent_mb: float = 0.0
    update_error: float | None = None
    fused_gate_up: bool | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


# ---- the optimizers --------------------------------------------------------------------------


def _config(**fields: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        **(
            {
                "optimizer": "adam",
                "lr": LR,
                "weight_decay": WEIGHT_DECAY,
                "clip_grad": 1.0,
                "params_dtype": torch.float32,
                "use_distributed_optimizer": True,
            }
            | fields
        )
    )


def build_adamw(model: Any) -> tuple[Any, Any]:
    from megatron.core.optimizer import get_megatron_optimizer

    wrapped = tiny_gpt.wrap_ddp(model)
    return wrapped, get_megatron_optimizer(_config(), [wrapped])


def build_dmuon(model: Any, *, split_gate_up: bool) -> tuple[Any, Any]:
    import megatron_muon

    wrapped = tiny_gpt.wrap_ddp(model)
    settings = megatron_muon.MatrixConfig(
        momentum=MOMENTUM,
        num_ns_steps=STEPS,
        scale_mode=SCALE_MODE,
        split_gate_up=split_gate_up,
        compute_dtype="fp32",
    )
    return wrapped, megatron_muon.get_matrix_optimizer(_config(), [wrapped], matrix_config=settings)


def build_upstream(model: Any, *, tp_mode: str) -> tuple[Any, Any]:
    """As ``--optimizer muon --use-distributed-optimizer`` does: layer-wise over data parallel."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.training.training import wrap_model_chunks_with_ddp

    chunks = wrap_model_chunks_with_ddp(
        [model],
        model.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        use_layer_wise_distributed_optimizer=True,
    )
    config = _config(
        optimizer="muon",
        use_distributed_optimizer=False,
        use_layer_wise_distributed_optimizer=True,
        # Without it the layer-wise optimizer lacks its wrapper and cannot be built. The
        # parameters are fp32 all the same, and the wrapper leaves such parameters as they are.
        bf16=True,
        muon_tp_mode=tp_mode,
        muon_momentum=MOMENTUM,
        muon_num_ns_steps=STEPS,
        muon_scale_mode=SCALE_MODE,
        # "medium", the default, would round the iterates to bf16.
        muon_fp32_matmul_prec="highest",
    )
    return chunks[0], get_megatron_optimizer(config, chunks)


VARIANTS = (
    Variant(key="adamw", label="AdamW", fused_gate_up=None, build=build_adamw),
    Variant(
        key="dmuon",
        label="dmuon",
        fused_gate_up=False,
        build=partial(build_dmuon, split_gate_up=True),
    ),
    Variant(
        key="dmuon_fused",
        label="dmuon, gate+up one matrix",
        fused_gate_up=True,
        build=partial(build_dmuon, split_gate_up=False),
    ),
    *(
        Variant(
            key=f"muon_{mode}",
            label=f"megatron-core muon, {mode}",
            fused_gate_up=True,
            build=partial(build_upstream, tp_mode=mode),
        )
        for mode in ("blockwise", "duplicated", "distributed")
    ),
)


# ---- counting --------------------------------------------------------------------------------


class SentBytes:
    """Counts what this rank sends, in the process groups' own methods, under every collective.

    As a ring or a pairwise exchange sends it; of a rank's own piece nothing is counted.
    """

    COUNTED = (
        "_allgather_base",
        "all_gather_single",
        "all_to_all_single",
        "allgather",
        "allreduce",
        "alltoall_base",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "broadcast",
        "barrier",
    )
    REFUSED = (
        "all_gather_single_coalesced",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "allreduce_coalesced",
        "alltoall",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "scatter",
        "send",
    )

    def __init__(self) -> None:
        self.total = 0.0
        self.calls: dict[str, int] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[SentBytes]:
        methods = vars(dist.ProcessGroup)
        names = [name for name in (*self.COUNTED, *self.REFUSED) if name in methods]
        # As they lie in the class: what getattr gives would no longer bind to an instance.
        originals = {name: methods[name] for name in names}
        for name in names:
            wrapped = self._wrapped(name, getattr(dist.ProcessGroup, name))
            setattr(dist.ProcessGroup, name, wrapped)
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(dist.ProcessGroup, name, original)

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            self.total += self._sent(name, group, args)
            return original(group, *args, **kwargs)

        return collective

    def _sent(self, name: str, group: Any, args: tuple[Any, ...]) -> float:
        size: int = group.size()
        match name:
            case "barrier":
                return 0.0
            case "allgather" | "_allgather_base" | "all_gather_single":
                return (size - 1) * _bytes(args[1])
            case "allreduce":
                return 2 * (size - 1) / size * _bytes(args[0])
            case "_reduce_scatter_base" | "reduce_scatter_single":
                return (size - 1) / size * _bytes(args[1])
            case "broadcast":
                return (size - 1) / size * _bytes(args[0])
            case "alltoall_base" | "all_to_all_single":
                sent, splits = args[1], args[3]
                rows: int = sent.shape[0]
                own: int = splits[group.rank()] if splits else rows // size
                return _bytes(sent) * (rows - own) / max(rows, 1)
        raise NotImplementedError(f"SentBytes does not know what {name} sends.")


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(one) for one in value)


# ---- in a rank -------------------------------------------------------------------------------


class Contender:
    """An optimizer with its model in one rank, and the gradients it gets before every step."""

    def __init__(self, variant: Variant, layers: int, grads: dict[str, torch.Tensor]) -> None:
        self.variant = variant
        # dmuon prints its routing table.
        with contextlib.redirect_stdout(io.StringIO()):
            self.model, self.optimizer = variant.build(build_model(layers))
        self.grads = grads

    def step(self) -> float:
        """Seconds of one step, of the slowest rank."""
        self._fill()
        dist.barrier()
        start = time.perf_counter()
        succeeded, _, _ = self.optimizer.step()
        elapsed = torch.tensor(time.perf_counter() - start)
        assert succeeded
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return float(elapsed)

    def counted_step(self) -> tuple[float, float]:
        """(FLOPs of matrix products, bytes sent) of one step of this rank."""
        from torch.utils.flop_counter import FlopCounterMode

        self._fill()
        with FlopCounterMode(display=False) as flops, SentBytes().counting() as sent:
            succeeded, _, _ = self.optimizer.step()
        assert succeeded
        self._check_counts(flops.get_total_flops(), sent.calls)
        return float(flops.get_total_flops()), sent.total

    def _fill(self) -> None:
        for name, param in self.model.module.named_parameters():
            param.main_grad.copy_(self.grads[name])

    def _check_counts(self, flops: int, calls: dict[str, int]) -> None:
        """The exchange's own prediction must agree with what was counted around it."""
        for child in self.optimizer.chained_optimizers:
            exchange = getattr(child, "exchange", None)
            if exchange is None:
                continue
            load = exchange.load
            assert load.flops == flops, (load.flops, flops)
            assert load.sent_bytes == exchange.counters.sent_bytes
            assert exchange.counters.messages == sum(
                calls.get(name, 0) for name in ("alltoall_base", "all_to_all_single")
            )


def build_model(layers: int) -> Any:
    return tiny_gpt.build_gpt(
        layers=layers,
        hidden=HIDDEN,
        heads=HEADS,
        query_groups=GROUPS,
        ffn=FFN,
        vocab=VOCAB,
        seq=SEQUENCE,
    )


def common_gradients(layers: int) -> tuple[dict[str, torch.Tensor], Any]:
    """This rank's gradients of one batch, summed over data parallel, and the model they are of."""
    source = tiny_gpt.wrap_ddp(build_model(layers), use_distributed_optimizer=False)
    batch = tiny_gpt.batch(0, global_batch=SEQUENCES, micro_batch=2, seq=SEQUENCE, vocab=VOCAB)
    tiny_gpt.forward_backward(source, batch)
    return {n: p.main_grad.clone() for n, p in source.module.named_parameters()}, source


def reference_updates(
    weights: dict[str, torch.Tensor], grads: dict[str, torch.Tensor], *, fused_gate_up: bool
) -> dict[str, torch.Tensor]:
    """The first updates of one layer in float64, on whole matrices.

    Clipping is left out: it scales all gradients alike, and the first update does not depend on it.
    """
    muon = ReferenceMuon(
        lr=LR,
        momentum=MOMENTUM,
        nesterov=False,
        weight_decay=WEIGHT_DECAY,
        scale_mode=SCALE_MODE,
        extra_scale_factor=1.0,
        coefficients=QUINTIC,
    )
    parts = {CHECKED[0]: qkv_parts(GROUPS, HEADS, HIDDEN // HEADS)}
    if not fused_gate_up:
        parts[CHECKED[2]] = gate_up_parts(FFN)
    return muon.step({n: weights[n].double() for n in CHECKED}, grads, parts)


def measure(rank: int, spread: Layout, layers: int, rounds: int) -> dict[str, Measurement]:
    """Everything for one layout, in one rank; all ranks return the same, but for the errors.

    The errors of an optimizer are known to the rank that computes its reference, 0 or 1.
    """
    started = time.monotonic()
    warnings.simplefilter("ignore")
    layout(tp=spread.tp)

    def say(text: str) -> None:
        if rank == 0:
            print(f"[{spread.name}] {text}", flush=True)

    say("building the models and one batch of gradients")
    grads, source = common_gradients(layers)
    before = {n: t for n, t in tiny_gpt.gather_full(source).items() if n in CHECKED}
    whole_grads = {
        n: t for n, t in tiny_gpt.gather_full(source, "main_grad").items() if n in CHECKED
    }
    del source
    contenders = [Contender(variant, layers, grads) for variant in VARIANTS]
    results = {v.key: Measurement(label=v.label, fused_gate_up=v.fused_gate_up) for v in VARIANTS}

    say("first step of each: counting, and comparing with float64")
    reference: dict[str, torch.Tensor] = {}
    if rank < 2:
        reference = reference_updates(before, whole_grads, fused_gate_up=rank == 1)
    dist.barrier()
    for contender in contenders:
        variant, result = contender.variant, results[contender.variant.key]
        counts = torch.tensor(contender.counted_step(), dtype=torch.float64)
        everyone = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, counts)
        flops, sent = torch.stack(everyone).unbind(1)
        result.gflop_max, result.gflop_mean = float(flops.max()) / 1e9, float(flops.mean()) / 1e9
        result.sent_mb = float(sent.max()) / 1e6
        after = tiny_gpt.gather_full(contender.model)
        if variant.fused_gate_up is not None and rank == int(variant.fused_gate_up):
            result.update_error = max(
                float((after[n].double() - before[n].double() - r).norm() / r.norm())
                for n, r in reference.items()
            )

    rounds_started = time.monotonic()
    for number in range(1, rounds + 1):
        for contender in contenders:
            results[contender.variant.key].seconds.append(contender.step())
        took = "  ".join(f"{key} {result.seconds[-1]:.2f}" for key, result in results.items())
        say(f"round {number}: {took} (s)")
        now = time.monotonic()
        # When another round, as long as those before, would end.
        ending = torch.tensor(now - started + (now - rounds_started) / number)
        dist.all_reduce(ending, dist.ReduceOp.MAX)
        if number >= MIN_ROUNDS and float(ending) > BUDGET_S:
            break
    return results


# ---- the report ------------------------------------------------------------------------------


def merged(outcomes: Sequence[dict[str, Measurement]]) -> dict[str, Measurement]:
    results = outcomes[0]
    for key, result in results.items():
        errors = [o[key].update_error for o in outcomes if o[key].update_error is not None]
        result.update_error = errors[0] if errors else None
    return results


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        if names:
            model = names[0].partition(":")[2].strip()
    return {
        "machine": platform.node(),
        "cpu": model,
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "megatron-core", "emerging-optimizers")},
    }


def markdown(
    about: dict[str, Any], layers: int, tables: dict[str, dict[str, Measurement]], total_s: float
) -> str:
    lines = [
        (
            f"Optimizer step on {RANKS} gloo ranks, one thread each, fp32: {layers} Llama-shaped "
            f"layer{'s' if layers > 1 else ''}, h = {HIDDEN}, FFN {FFN} (gated), {HEADS} heads, "
            f"{GROUPS} query groups, {STEPS} Newton-Schulz steps."
        ),
        "",
        (
            f"{about['cpu']}, {about['cores']} cores (load {about['load_at_start']} at the start); "
            f"torch {about['torch']}, megatron-core {about['megatron-core']}, emerging-optimizers "
            f"{about['emerging-optimizers']}."
        ),
    ]
    for name, results in tables.items():
        adamw, dmuon = results["adamw"].median, results["dmuon"].median
        lines += [
            "",
            f"**{name}**, median of {len(results['adamw'].seconds)} rounds (min–max)",
            "",
            (
                "| optimizer | step, s | × AdamW | × dmuon | GFLOP per rank, max (mean) "
                "| MB sent per rank, max | first update off by |"
            ),
            "|---|---|---|---|---|---|---|",
        ]
        for result in results.values():
            error = "–" if result.update_error is None else f"{result.update_error:.1e}"
            lines.append(
                f"| {result.label} | {result.median:.2f} ({min(result.seconds):.2f}–"
                f"{max(result.seconds):.2f}) | {result.median / adamw:.1f} "
                f"| {result.median / dmuon:.2f} | {result.gflop_max:.1f} ({result.gflop_mean:.1f}) "
                f"| {result.sent_mb:.1f} | {error} |"
            )
    lines += [
        "",
        (
            "Time is that of `optimizer.step()`, the slowest rank of each step: clipping, update, "
            "and the gather of parameters; the reduction of gradients is not in it. FLOPs are "
            "those of matrix products, bytes those that leave a rank inside the step; both are "
            "counted while running. The last column is the relative error (Frobenius) of the first "
            "update of layer 0, the worst of its four weights, against one float64 process that "
            "has whole matrices. megatron-core's muon takes gate and up as one matrix, and so does "
            "the process that it is compared with; the third row is dmuon with that definition."
        ),
        "",
        (
            "megatron-core's muon is built as by `--optimizer muon --use-distributed-optimizer`: "
            "layer-wise over data parallel, here with fp32 parameters and "
            '`muon_fp32_matmul_prec="highest"`, so that no product is rounded to bf16. '
            f"The run took {total_s:.0f} s."
        ),
        "",
    ]
    return "\n".join(lines)


def draw(path: Path, tables: dict[str, dict[str, Measurement]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(tables), figsize=(11, 3.6), sharex=True, sharey=True, layout="constrained"
    )
    for axis, (name, results) in zip(axes, tables.items(), strict=True):
        medians = [result.median for result in results.values()]
        spreads = [
            [result.median - min(result.seconds) for result in results.values()],
            [max(result.seconds) - result.median for result in results.values()],
        ]
        colors = [
            "tab:gray" if key == "adamw" else "tab:blue" if key.startswith("dmuon") else "tab:red"
            for key in results
        ]
        labels = [result.label for result in results.values()]
        bars = axis.barh(labels, medians, xerr=spreads, color=colors, ecolor="black", capsize=2)
        axis.bar_label(bars, [f" {median:.2f} s" for median in medians], padding=6)
        axis.margins(x=0.2)
        axis.set(title=name, xlabel="optimizer step, s (median, min–max)")
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=150)


def as_json(
    about: dict[str, Any], layers: int, tables: dict[str, dict[str, Measurement]]
) -> dict[str, Any]:
    return {
        "about": about,
        "model": {
            "layers": layers,
            "hidden": HIDDEN,
            "heads": HEADS,
            "query_groups": GROUPS,
            "ffn": FFN,
            "dtype": "fp32",
            "ns_steps": STEPS,
        },
        "layouts": {
            name: {
                key: asdict(result)
                | {
                    "median_s": result.median,
                    "min_s": min(result.seconds),
                    "max_s": max(result.seconds),
                    "over_adamw": result.median / results["adamw"].median,
                    "over_dmuon": result.median / results["dmuon"].median,
                }
                for key, result in results.items()
            }
            for name, results in tables.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one layer, two rounds")
    parser.add_argument("--rounds", type=int, help=f"timed rounds at most, {ROUNDS} by default")
    arguments = parser.parse_args()
    layers = 1 if arguments.quick else 4
    rounds = arguments.rounds or (2 if arguments.quick else ROUNDS)
    started = time.monotonic()
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load_at_start']}", flush=True)

    # The ranks are forks of this process, so that Megatron is imported once.
    torch.set_num_threads(1)
    from megatron_muon import cpu

    # Of Transformer Engine and Apex, which a CPU has not, and of models and layouts that are fine.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpu.enable()
        import megatron.training.training  # noqa: F401

    tables = {
        spread.name: merged(run_ranks(RANKS, measure, spread, layers, rounds, timeout=900))
        for spread in LAYOUTS
    }

    OUTPUT.mkdir(exist_ok=True)
    table = markdown(about, layers, tables, time.monotonic() - started)
    (OUTPUT / "first_comparison.md").write_text(table)
    (OUTPUT / "first_comparison.json").write_text(
        json.dumps(as_json(about, layers, tables), indent=2, ensure_ascii=False) + "\n"
    )
    draw(OUTPUT / "first_comparison.png", tables)
    print(f"\n{table}\nwritten to {OUTPUT.relative_to(ROOT)}/first_comparison.{{md,json,png}}")


if __name__ == "__main__":
    main()
