"""Training runs on real megatron-core that tests compare: every step's gradients and weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_muon.config import MatrixConfig
from tests import tiny_gpt
from tests.ranks import layout
from tests.reference.muon import ReferenceAdamW, ReferenceMuon, clip, gate_up_parts, qkv_parts

LAYERS, HIDDEN, HEADS, GROUPS, FFN = 4, 32, 8, 4, 48
HEAD_DIM = HIDDEN // HEADS
LR, MIN_LR, WEIGHT_DECAY = 2e-2, 2e-3, 0.1
WARMUP = 4
GLOBAL_BATCH = 16
BETAS, EPS = (0.9, 0.95), 1e-8


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    Attributes:
        tp: Tensor-parallel size.
        dp: Data-parallel size.
        pp: Pipeline-parallel size.
        optimizer: ``dmuon`` or ``adam``.
        steps: Number of steps.
        overlap: Reduce and gather overlapped with backward and forward, several small buckets.
        sequence_parallel: Sequence parallelism.
        clip_grad: Clipping threshold.
        dtype: Dtype of the model parameters.
        config: Settings of the matrix optimizer.
        keep: What a rank returns: every step's ``gradients`` and ``weights``, or the ``last``.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    optimizer: str = "dmuon"
    steps: int = 20
    overlap: bool = False
    sequence_parallel: bool = False
    clip_grad: float = 1.0
    dtype: torch.dtype = torch.float32
    config: MatrixConfig = field(default_factory=MatrixConfig)
    keep: str = "every"

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp


def build(run: Run) -> tuple[Any, Any, Any]:
    """(wrapped model, optimizer, scheduler) of a rank; makes the process groups."""
    layout(tp=run.tp, pp=run.pp)
    model = tiny_gpt.build_gpt(
        layers=LAYERS,
        hidden=HIDDEN,
        heads=HEADS,
        query_groups=GROUPS,
        ffn=FFN,
        params_dtype=run.dtype,
        sequence_parallel=run.sequence_parallel and run.tp > 1,
    )
    wrapped = tiny_gpt.wrap_ddp(
        model,
        overlap_grad_reduce=run.overlap,
        overlap_param_gather=run.overlap,
        bucket_size=3_000 if run.overlap else None,
    )
    optimizer = make_optimizer(run, wrapped)
    return wrapped, optimizer, scheduler(optimizer, run.steps)


def make_optimizer(run: Run, wrapped: Any) -> Any:
    """The optimizer of a run, through the calling convention of ``get_megatron_optimizer``."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import megatron_muon

    config = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        min_lr=MIN_LR,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        clip_grad=run.clip_grad,
        bf16=run.dtype == torch.bfloat16,
        params_dtype=run.dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=run.overlap,
        log_num_zeros_in_grad=True,
    )
    if run.optimizer == "adam":
        return get_megatron_optimizer(config, [wrapped])
    return megatron_muon.get_matrix_optimizer(config, [wrapped], matrix_config=run.config)


def scheduler(optimizer: Any, steps: int) -> Any:
    """Megatron's scheduler: warm-up, then cosine decay."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=LR / 10,
        max_lr=LR,
        min_lr=MIN_LR,
        lr_warmup_steps=WARMUP,
        lr_decay_steps=max(steps, 20),
        lr_decay_style="cosine",
        start_wd=WEIGHT_DECAY,
        end_wd=WEIGHT_DECAY,
        wd_incr_steps=max(steps, 20),
        wd_incr_style="constant",
    )


def train(rank: int, run: Run) -> dict[str, Any]:
    """Train on one rank.

    Returns:
        Of rank 0 whole tensors of every step, of the others only what tests hash.
    """
    wrapped, optimizer, schedule = build(run)
    keeps_every = run.keep == "every"
    record: dict[str, Any] = {"losses": [], "norms": [], "zeros": [], "lrs": [], "steps": []}
    record["names"] = list(tiny_gpt.gather_full(wrapped))
    record["first"] = tiny_gpt.gather_full(wrapped)
    record["hashes"] = []
    for step in range(run.steps):
        optimizer.zero_grad()
        # Two micro-batches at every layout: enough for accumulation, and TP collectives are slow.
        micro_batches = tiny_gpt.batch(
            step, global_batch=GLOBAL_BATCH, micro_batch=GLOBAL_BATCH // run.dp // 2
        )
        record["losses"].append(tiny_gpt.forward_backward(wrapped, micro_batches, optimizer))
        gradients = tiny_gpt.gather_full(wrapped, "main_grad") if keeps_every else None
        record["lrs"].append(optimizer.param_groups[0]["lr"])
        succeeded, norm, zeros = optimizer.step()
        assert succeeded
        schedule.step(1)
        record["norms"].append(float(norm))
        record["zeros"].append(float(zeros))
        weights = tiny_gpt.gather_full(wrapped)
        record["hashes"].append(replica_hashes(wrapped))
        if keeps_every and rank == 0:
            record["steps"].append((gradients, weights))
    record["last"] = weights
    counters = [
        (child.exchange.counters, child.plan.loads[child.exchange.rank])
        for child in optimizer.chained_optimizers
        if getattr(child, "exchange", None) is not None
    ]
    record["counters"] = counters
    return record


def replica_hashes(wrapped: Any) -> dict[str, bytes]:
    """Bytes of every local parameter, to be compared with its copies on other ranks."""
    return {
        name: parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, parameter in wrapped.named_parameters()
    }


def parts() -> dict[str, list[torch.Tensor]]:
    """Rows of the logical matrices of each packed parameter."""
    rows: dict[str, list[torch.Tensor]] = {}
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}"
        rows[f"{at}.self_attention.linear_qkv.weight"] = qkv_parts(GROUPS, HEADS, HEAD_DIM)
        rows[f"{at}.mlp.linear_fc1.weight"] = gate_up_parts(FFN)
    return rows


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    """Which parameters of the tiny GPT are matrices, said independently of the package."""
    return tensor.dim() == 2 and name.startswith("decoder.")


@dataclass(frozen=True, kw_only=True)
class StepErrors:
    """Largest relative errors of a run against the float64 reference.

    Attributes:
        matrix: Of a matrix's update, over all steps.
        scalar: Of another parameter's update, over all steps.
        norm: Of the gradient norm.
    """

    matrix: float
    scalar: float
    norm: float


def errors_against_reference(
    run: Run, record: dict[str, Any], coefficients: list[tuple[float, float, float]]
) -> StepErrors:
    """Compare every step's update with one float64 process given that step's gradients."""
    muon = ReferenceMuon(
        lr=LR,
        momentum=run.config.momentum,
        nesterov=run.config.nesterov,
        weight_decay=WEIGHT_DECAY,
        scale_mode=run.config.scale_mode,
        extra_scale_factor=run.config.extra_scale_factor,
        coefficients=coefficients,
    )
    adamw = ReferenceAdamW(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    before = record["first"]
    worst = {"matrix": 0.0, "scalar": 0.0, "norm": 0.0}
    for (gradients, weights), lr, norm in zip(
        record["steps"], record["lrs"], record["norms"], strict=True
    ):
        exact = {name: grad.double() for name, grad in gradients.items()}
        clipped, exact_norm = clip(exact, run.clip_grad)
        worst["norm"] = max(worst["norm"], abs(norm / exact_norm - 1.0))
        old = {name: tensor.double() for name, tensor in before.items()}
        matrices = {n: t for n, t in old.items() if is_matrix(n, t)}
        scalars = {n: t for n, t in old.items() if n not in matrices}
        expected = muon.step(
            matrices, {n: clipped[n] for n in matrices}, parts(), lr=lr
        ) | adamw.step(
            scalars,
            {n: clipped[n] for n in scalars},
            lr=lr,
            weight_decay={n: 0.0 for n, t in scalars.items() if t.dim() == 1},
        )
        for name, update in expected.items():
            got = weights[name].double() - before[name].double()
            kind = "matrix" if name in matrices else "scalar"
            worst[kind] = max(worst[kind], float((got - update).norm() / update.norm()))
        before = weights
    return StepErrors(**worst)
