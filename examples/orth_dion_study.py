"""AdamW, DMuon, Dion and Orth-Dion on the same text, model and budget, on real megatron-core.

    OMP_NUM_THREADS=1 .venv/bin/python examples/orth_dion_study.py

Every optimizer has the best of a small grid of learning rates by the loss on held-out text, one
seed. A run is one process (the update does not depend on the layout); two run at a time. The bytes
are those of the plan for the same model on four ranks, TP4 and TP2 x DP2, which is built there.
Writes result.json, result.md and loss.png to study_output/.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - needs the path above
from text_corpus import END_OF_DOCUMENT, HELD_OUT_PERCENT, select_documents  # noqa: E402

from megatron_muon import MatrixConfig, cpu  # noqa: E402

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCAB = 3, 128, 4, 2, 352, 264
SEQUENCE, BATCH = 128, 16
WARMUP, SCALAR_LR = 15, 4e-3
EVALUATION_BATCHES = 24
SEED = 1234


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the table.

    Attributes:
        name: As shown.
        rates: Learning rates tried, of the matrices (AdamW: of everything).
        matrix: Settings of the matrix optimizer, None for AdamW.
    """

    name: str
    rates: tuple[float, ...]
    matrix: MatrixConfig | None


def contenders() -> list[Contender]:
    """AdamW, dmuon, and Orth-Dion at four ranks with three right factors (colnorm is Dion)."""
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
    """Byte tokens of the training text and of the held-out text."""
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
    """(count, batch, sequence + 1) windows at random places."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - SEQUENCE - 1, (count, BATCH), generator=generator)
    return text[starts[..., None] + torch.arange(SEQUENCE + 1)]


def join(world_size: int, rank: int, store: str, tp: int) -> None:
    """Make process groups; a file is the meeting point."""
    from megatron_muon.exchange.measuring import join_world
    from megatron_muon.integration.contenders import make_groups

    torch.set_num_threads(1)
    join_world(rank=rank, size=world_size, store=store, backend="gloo")
    make_groups(tp, SEED)


def build(contender: Contender, rate: float, tp: int = 1) -> tuple[Any, Any]:
    """The wrapped model and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    from megatron_muon import get_matrix_optimizer

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=FFN,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
    )
    wrapped = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        ),
        module=model,
    )
    scalar_rate = rate if contender.matrix is None else SCALAR_LR
    settings = OptimizerConfig(
        optimizer="adam",
        lr=scalar_rate,
        min_lr=scalar_rate / 10,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=1.0,
        params_dtype=torch.float32,
        use_distributed_optimizer=True,
    )
    if contender.matrix is None:
        return wrapped, get_megatron_optimizer(settings, [wrapped])
    matrix = dataclasses.replace(contender.matrix, lr=rate, min_lr=rate / 10)
    return wrapped, get_matrix_optimizer(settings, [wrapped], matrix_config=matrix)


def loss_of(model: Any, windows: torch.Tensor) -> torch.Tensor:
    """Mean loss of a batch (batch, sequence + 1)."""
    positions = torch.arange(SEQUENCE).expand(len(windows), -1)
    losses: torch.Tensor = model(windows[:, :-1], positions, None, labels=windows[:, 1:])
    return losses.mean()


def train(contender: Contender, rate: float, steps: int, data: str) -> dict[str, Any]:
    """One run in a process of its own."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    texts = torch.load(data, weights_only=True)
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
        join(1, 0, f"{folder}/store", 1)
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
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = loss_of(model, windows)
        torch.autograd.backward(loss)
        model.finish_grad_sync()
        before = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - before)
        scheduler.step(1)
        losses.append(float(loss.detach()))
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


def count_bytes(rank: int, contender: Contender, tp: int, store: str, path: str) -> None:
    """What a rank of four sends in a step at most, from the plan; written by rank 0."""
    from megatron_muon.integration.report import adam_traffic_bytes

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    join(4, rank, store, tp)
    model, optimizer = build(contender, 1e-2, tp)
    if rank == 0:
        sent = (
            max(load.sent_bytes for load in optimizer.chained_optimizers[0].plan.loads)
            if contender.matrix is not None
            else 0
        )
        adam = adam_traffic_bytes(model.buffers, 4 // tp)
        Path(path).write_text(json.dumps({"exchange": sent, "adam": adam}))


def bytes_at(contender: Contender, tp: int) -> dict[str, int]:
    """Start four ranks that build the plan."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/bytes.json"
        ranks = [
            fork.Process(target=count_bytes, args=(rank, contender, tp, f"{folder}/store", path))
            for rank in range(4)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        found: dict[str, int] = json.loads(Path(path).read_text())
    return found


def run_all(found: list[Contender], steps: int, data: str) -> list[dict[str, Any]]:
    """Every contender at every rate, two at a time; the best rate of each."""
    jobs = [(contender, rate) for contender in found for rate in contender.rates]
    runs: list[dict[str, Any]] = []
    # A process for every run: Megatron's groups are made once in a life.
    with ProcessPoolExecutor(
        2, mp_context=multiprocessing.get_context("fork"), max_tasks_per_child=None
    ) as pool:
        futures: list[Future[dict[str, Any]]] = [
            pool.submit(in_own_process, contender, rate, steps, data) for contender, rate in jobs
        ]
        for number, future in enumerate(as_completed(futures), start=1):
            run = future.result()
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


def in_own_process(contender: Contender, rate: float, steps: int, data: str) -> dict[str, Any]:
    """Fork once more, so that nothing of a run is left for the next."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/run.json"
        process = fork.Process(target=_write_run, args=(contender, rate, steps, data, path))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{contender.name} at {rate:g} ended with {process.exitcode}")
        run: dict[str, Any] = json.loads(Path(path).read_text())
    return run


def _write_run(contender: Contender, rate: float, steps: int, data: str, path: str) -> None:
    Path(path).write_text(json.dumps(train(contender, rate, steps, data)))


def table(best: list[dict[str, Any]]) -> str:
    """The Markdown table."""
    lines = [
        (
            "| optimizer | held-out loss | learning rate (tried) | optimizer, ms a step | run, s | "
            "exchange at TP4, MB a rank and step | at TP2·DP2, MB (AdamW's own traffic) |"
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
    """Running mean of the training loss over steps."""
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
    parser.add_argument("--steps", type=int, default=150, help="steps of a run")
    parser.add_argument("--out", type=Path, default=ROOT / "study_output", help="folder to write")
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    options = parser.parse_args()
    cpu.enable()
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401 - so that forks need not import it

    options.out.mkdir(parents=True, exist_ok=True)
    train_text, held_out = corpus(2.0)
    data = str(options.out / "tokens.pt")
    torch.save({"train": train_text, "held_out": held_out}, data)
    found = [c for c in contenders() if options.only in c.name]
    best = run_all(found, options.steps, data)
    for run, contender in zip(best, found, strict=True):
        run["tp4"], run["tp2"] = bytes_at(contender, 4), bytes_at(contender, 2)
    (options.out / "result.json").write_text(json.dumps(best, indent=1))
    (options.out / "result.md").write_text(table(best) + "\n")
    plot(best, options.out / "loss.png")
    print(table(best))
    return 0


if __name__ == "__main__":
    sys.exit(main())
