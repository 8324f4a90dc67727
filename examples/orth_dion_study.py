"""Compares AdamW, DMuon, Dion and Orth-Dion on one text, model and budget, on megatron-core.

    OMP_NUM_THREADS=1 .venv/bin/python examples/orth_dion_study.py

Every optimizer uses the best of a small grid of learning rates by the loss on held-out text, one
seed. A run is one process (the update does not depend on the layout); two run at a time. Bytes are
those of the plan for the same model on four ranks, TP4 and TP2 x DP2.
Writes result.json, result.md and loss.png to study_output/.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - needs the path above
from text_corpus import END_OF_DOCUMENT, HELD_OUT_PERCENT, select_documents  # noqa: E402

from megatron_muon import MatrixConfig, cpu  # noqa: E402
from tests.ranks import layout, run_ranks  # noqa: E402

SEQUENCE, BATCH = 128, 16
SIZE = {
    "layers": 3,
    "hidden": 128,
    "ffn": 352,
    "heads": 4,
    "query_groups": 2,
    "vocab": 264,
    "sequence": SEQUENCE,
}
WARMUP, SCALAR_LR = 15, 4e-3
EVALUATION_BATCHES = 24
SEED = 1234
LIMIT_S = 24 * 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the table.

    Attributes:
        name: Name in the table.
        rates: Learning rates tried, of matrices (AdamW: of all parameters).
        matrix: Settings of the matrix optimizer, None for AdamW.
    """

    name: str
    rates: tuple[float, ...]
    matrix: MatrixConfig | None


def contenders() -> list[Contender]:
    """Return AdamW, dmuon, and Orth-Dion at four ranks with three right factors."""
    found = [
        Contender(name="AdamW", rates=(5e-4, 1e-3, 2e-3, 4e-3), matrix=None),
        Contender(
            name="dmuon",
            rates=(2.5e-3, 5e-3, 1e-2, 2e-2),
            matrix=MatrixConfig(scale_mode="match_rms_adamw", nesterov=True),
        ),
    ]
    for fraction in (0.125, 0.25, 0.5, 1.0):
        for kind, name in (
            ("qr", "Orth-Dion qr"),
            ("polar", "Orth-Dion polar"),
            ("colnorm", "Dion"),
        ):
            found.append(
                Contender(
                    name=f"{name}, r = {fraction:g}",
                    rates=(2.5e-3, 5e-3, 1e-2, 2e-2),
                    matrix=MatrixConfig(
                        optimizer="orth_dion",
                        scale_mode="match_rms_adamw",
                        rank_fraction=fraction,
                        right_factor=kind,
                    ),
                )
            )
    return found


def corpus(megabytes: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return byte tokens of the training text and of the held-out text."""
    tokens = [
        torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        for text in select_documents(int(megabytes * 1_000_000))
    ]
    end = torch.tensor([END_OF_DOCUMENT])
    held_out = max(1, len(tokens) * HELD_OUT_PERCENT // 100)
    joined = [
        torch.cat([piece for text in part for piece in (text, end)])
        for part in (tokens[:-held_out], tokens[-held_out:])
    ]
    return joined[0], joined[1]


def batches(text: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Return (count, batch, sequence + 1) windows at random positions."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - SEQUENCE - 1, (count, BATCH), generator=generator)
    return text[starts[..., None] + torch.arange(SEQUENCE + 1)]


def build(contender: Contender, rate: float, tp: int = 1) -> tuple[Any, Any]:
    """Create process groups, and build the wrapped model and its optimizer."""
    from benchmarks.models import ModelSize, build_model, make_optimizer, wrap

    layout(tp, seed=SEED)
    model = wrap(build_model(ModelSize(**SIZE)))
    scalar_rate = rate if contender.matrix is None else SCALAR_LR
    matrix = contender.matrix and dataclasses.replace(contender.matrix, lr=rate, min_lr=rate / 10)
    settings = {
        "lr": scalar_rate,
        "min_lr": scalar_rate / 10,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
    }
    return model, make_optimizer(model, matrix, **settings)


def train(rank: int, contender: Contender, rate: float, steps: int, data: str) -> dict[str, Any]:
    """Run one contender in its own process."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from benchmarks.models import backward, loss_of

    texts = torch.load(data, weights_only=True)
    model, optimizer = build(contender, rate)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=rate,
        min_lr=rate / 10,
        lr_warmup_steps=WARMUP,
        lr_decay_steps=steps,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
    losses, seconds, began = [], [], time.perf_counter()
    for windows in batches(texts["train"], steps, SEED):
        optimizer.zero_grad()
        loss = backward(model, windows)
        model.finish_grad_sync()
        before = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - before)
        scheduler.step(1)
        losses.append(float(loss))
    whole = time.perf_counter() - began
    with torch.no_grad():
        held_out = batches(texts["held_out"], EVALUATION_BATCHES, SEED + 1)
        validation = statistics.fmean(float(loss_of(model, windows)) for windows in held_out)
    return {
        "name": contender.name,
        "rate": rate,
        "losses": losses,
        "validation": validation,
        "optimizer_ms": 1e3 * statistics.median(seconds[3:]),
        "seconds": whole,
    }


def count_bytes(rank: int, contender: Contender, tp: int) -> dict[str, int]:
    """Return the maximum bytes that one of four ranks sends in a step, from the plan."""
    from megatron_muon.integration.report import adam_traffic_bytes

    model, optimizer = build(contender, 1e-2, tp)
    loads = () if contender.matrix is None else optimizer.chained_optimizers[0].plan.loads
    return {
        "exchange": max((load.sent_bytes for load in loads), default=0),
        "adam": adam_traffic_bytes(model.buffers, 4 // tp),
    }


def run_all(found: list[Contender], steps: int, data: str) -> list[dict[str, Any]]:
    """Run all contenders at all rates, two at a time; return the best rate of each."""
    jobs = [(contender, rate) for contender in found for rate in contender.rates]
    runs: list[dict[str, Any]] = []
    # Each forks its own rank: Megatron's groups are created once per process.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        futures: list[Future[list[dict[str, Any]]]] = [
            pool.submit(run_ranks, 1, train, contender, rate, steps, data, timeout=LIMIT_S)
            for contender, rate in jobs
        ]
        for number, future in enumerate(as_completed(futures), start=1):
            [run] = future.result()
            runs.append(run)
            print(
                f"[{number}/{len(jobs)}] {run['name']} at {run['rate']:g}: held-out loss "
                f"{run['validation']:.4f}, {run['seconds']:.0f} s",
                flush=True,
            )
    best = []
    for contender in found:
        tried = [run for run in runs if run["name"] == contender.name]
        winner = min(tried, key=lambda run: run["validation"])
        best.append(winner | {"tried": {f"{r['rate']:g}": r["validation"] for r in tried}})
    return best


def table(best: list[dict[str, Any]]) -> str:
    """Return the Markdown table."""
    lines = [
        (
            "| optimizer | held-out loss | learning rate (tested) | optimizer, ms per step | "
            "run, s | exchange at TP4, MB per rank and step | "
            "at TP2·DP2, MB (AdamW's own traffic) |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for run in best:
        tried = ", ".join(sorted(run["tried"], key=float))
        lines.append(
            f"| {run['name']} | {run['validation']:.4f} | {run['rate']:g} ({tried}) | "
            f"{run['optimizer_ms']:.1f} | {run['seconds']:.0f} | "
            f"{run['tp4']['exchange'] / 1e6:.2f} | {run['tp2']['exchange'] / 1e6:.2f} "
            f"({run['tp2']['adam'] / 1e6:.2f}) |"
        )
    return "\n".join(lines)


def plot(best: list[dict[str, Any]], path: Path) -> None:
    """Plot the running mean of the training loss."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5))
    for run in best:
        losses = run["losses"]
        means = [statistics.fmean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        style = {"A": "k-", "d": "k--", "O": "-", "D": ":"}[run["name"][0]]
        axes.plot(means, style, label=run["name"], linewidth=1)
    axes.set(xlabel="step", ylabel="training loss, mean of 10 steps", yscale="log")
    axes.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Run the study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150, help="steps per run")
    parser.add_argument("--out", type=Path, default=ROOT / "study_output", help="folder to write")
    parser.add_argument("--only", default="", help="run only contenders with this in their name")
    options = parser.parse_args()
    cpu.enable()
    import benchmarks.models  # noqa: F401 - imports Megatron once, before the forks

    options.out.mkdir(parents=True, exist_ok=True)
    train_text, held_out = corpus(2.0)
    data = str(options.out / "tokens.pt")
    torch.save({"train": train_text, "held_out": held_out}, data)
    found = [c for c in contenders() if options.only in c.name]
    best = run_all(found, options.steps, data)
    for run, contender in zip(best, found, strict=True):
        for tp in (4, 2):
            run[f"tp{tp}"] = run_ranks(4, count_bytes, contender, tp)[0]
    (options.out / "result.json").write_text(json.dumps(best, indent=1))
    (options.out / "result.md").write_text(table(best) + "\n")
    plot(best, options.out / "loss.png")
    print(table(best))
    return 0


if __name__ == "__main__":
    sys.exit(main())
