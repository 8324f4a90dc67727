"""Training runs on real megatron-core that tests compare: every step's gradients and weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.matrices import Rule
from megatron_muon.optim.dion_rule import seeded_right_factor
from tests import tiny_gpt
from tests.ranks import layout
from tests.reference.muon import ReferenceAdamW, ReferenceMuon, clip
from tests.reference.orth_dion import ReferenceOrthDion
from tests.te import loading
from tests.te.weights import quantize_weights
from tests.tiny_models import ALL_MODELS, SIZES, Layout, is_matrix
from tests.whole_parameters import global_name, unwrapped
from tests.worst import worst_of

LR, MIN_LR, WEIGHT_DECAY = 2e-2, 2e-3, 0.1
WARMUP = 4
GLOBAL_BATCH = 16
BETAS, EPS = (0.9, 0.95), 1e-8
RATES = (
    Rule(pattern="*.linear_fc1.weight", lr_mult=1.5, wd_mult=3.0),
    Rule(pattern="*.linear_fc2.weight", wd_mult=0.0),
    Rule(pattern="*.linear_proj.weight", lr_mult=2.0),
    Rule(pattern="*_layernorm.weight", lr_mult=2.0, wd_mult=0.5),
)
"""Rules that give adjacent parameters, including experts, different rates."""


@dataclass(frozen=True, kw_only=True)
class Run(Layout):
    """One training run.

    Attributes:
        model: Key of ``tests.tiny_models.ALL_MODELS``.
        optimizer: ``dmuon`` or ``adam``.
        steps: Number of steps.
        overlap: Reduce and gather overlapped with backward and forward, several small buckets.
        overlap_gather: The gather alone; None for as ``overlap``.
        sequence_parallel: Sequence parallelism.
        clip_grad: Clipping threshold.
        lr: Highest learning rate.
        dtype: Dtype of the model parameters.
        config: Settings of the matrix optimizer.
        keep: What a rank returns: ``every`` step's gradients and weights, hashes and the ``last``
            weights, or ``losses`` and the last weights.
        options: Further options of ``build_gpt``.
        fp8: Recipe by which linear weights are quantized; None for none.
        te: Version of Transformer Engine that does it.
        keep_bf16: Beginnings of names of modules whose weights are not quantized.
        fp32_gradients: Dtype of the gradient buffers and of their reduction.
        remember: Called with every model whose weights were quantized.
        padded: Whether buckets end at a multiple of 2**16 elements, beyond what small ones hold.
        loss_scale: First dynamic loss scale of fp16.
    """

    model: str = "gpt"
    optimizer: str = "dmuon"
    steps: int = 20
    overlap: bool = False
    overlap_gather: bool | None = None
    sequence_parallel: bool = False
    clip_grad: float = 1.0
    lr: float = LR
    dtype: torch.dtype = torch.float32
    config: MatrixConfig = field(default_factory=lambda: MatrixConfig(min_dim=1))
    keep: str = "every"
    options: tuple[tuple[str, Any], ...] = ()
    fp8: str | None = None
    te: str = loading.VERSIONS[-1]
    keep_bf16: tuple[str, ...] = ()
    fp32_gradients: bool = True
    remember: Callable[[Any], object] | None = None
    padded: bool = False
    loss_scale: float = 2.0**10

    @property
    def layers(self) -> int:
        """As few as the stages need, as collectives of every layer dominate the time."""
        uneven = "num_layers_in_first_pipeline_stage" in dict(self.options)
        return max(SIZES["layers"], self.pp * (self.vpp or 1)) + uneven

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return GLOBAL_BATCH if GLOBAL_BATCH % self.dp == 0 else 8 * self.dp

    @property
    def gathers_early(self) -> bool:
        """True if the parameter gather is overlapped with the next forward."""
        return self.overlap if self.overlap_gather is None else self.overlap_gather


def build(run: Run) -> tuple[list[Any], Any, Any]:
    """(wrapped model chunks, optimizer, scheduler) of a rank; makes the process groups."""
    layout(
        tp=run.tp,
        pp=run.pp,
        cp=run.cp,
        ep=run.ep,
        etp=run.etp,
        vpp=run.vpp,
        optimizer_instances=run.instances,
    )
    if run.fp8 is not None:
        loading.use(run.te)
    chunks = []
    for stage in range(run.vpp or 1):
        model = tiny_gpt.build_gpt(
            **(SIZES | {"layers": run.layers} | ALL_MODELS[run.model].options | dict(run.options)),
            params_dtype=run.dtype,
            sequence_parallel=run.sequence_parallel and run.tp > 1,
            vp_stage=stage if run.vpp else None,
        )
        chunks.append(
            tiny_gpt.wrap_ddp(
                model,
                overlap_grad_reduce=run.overlap,
                overlap_param_gather=run.gathers_early,
                bucket_size=3_000 if run.overlap else None,
                num_distributed_optimizer_instances=run.instances,
                disable_bucketing=stage > 0,
                prepare=None if run.fp8 is None else partial(_quantize, run),
                fp8_param_gather=run.fp8 is not None,
                reuse_grad_buf_for_mxfp8_param_ag=run.fp8 == "mxfp8",
                grad_reduce_in_fp32=run.fp32_gradients,
                pad_buckets_for_high_nccl_busbw=run.padded,
            )
        )
    optimizer = make_optimizer(run, chunks)
    return chunks, optimizer, scheduler(optimizer, run)


def _quantize(run: Run, model: Any) -> None:
    assert run.fp8 is not None
    quantize_weights(model, run.fp8, run.keep_bf16)
    if run.remember is not None:
        run.remember(model)


def make_optimizer(run: Run, chunks: list[Any]) -> Any:
    """The optimizer of a run, through the calling convention of ``get_megatron_optimizer``."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import megatron_muon

    config = OptimizerConfig(
        optimizer="adam",
        lr=run.lr,
        min_lr=run.lr / 10,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        clip_grad=run.clip_grad,
        bf16=run.dtype == torch.bfloat16,
        fp16=run.dtype == torch.float16,
        initial_loss_scale=run.loss_scale,
        hysteresis=1,
        params_dtype=run.dtype,
        fp8_recipe=run.fp8,
        reuse_grad_buf_for_mxfp8_param_ag=run.fp8 == "mxfp8",
        use_distributed_optimizer=True,
        overlap_param_gather=run.gathers_early,
        log_num_zeros_in_grad=True,
    )
    if run.optimizer == "adam":
        return get_megatron_optimizer(config, chunks)
    return megatron_muon.get_matrix_optimizer(config, chunks, matrix_config=run.config)


def scheduler(optimizer: Any, run: Run) -> Any:
    """Megatron's scheduler: warm-up, then cosine decay."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    decay = max(run.steps, 20)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=run.lr / 10,
        max_lr=run.lr,
        min_lr=run.lr / 10,
        lr_warmup_steps=WARMUP,
        lr_decay_steps=decay,
        lr_decay_style="cosine",
        start_wd=WEIGHT_DECAY,
        end_wd=WEIGHT_DECAY,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        # After a load the rates of this run hold.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def lr_of(schedule: Any, run: Run, factor: float) -> float:
    """The scheduled rate of groups with a factor on it; warm-up starts at one rate for all."""
    return float(schedule.get_lr({"max_lr": factor * run.lr, "min_lr": factor * run.lr / 10}))


def gather(chunks: list[Any], value: str = "param") -> dict[str, torch.Tensor]:
    """Whole parameters or gradients of all chunks of a rank."""
    found: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        found |= tiny_gpt.gather_full(chunk, value)  # type: ignore[arg-type]
    return found


def train(rank: int, run: Run) -> dict[str, Any]:
    """Train on one rank.

    Returns:
        Of the ranks that hold the first shards, whole tensors of every step; of the others only
        what tests hash.
    """
    from megatron.core import parallel_state

    chunks, optimizer, schedule = build(run)
    keeps_every = run.keep == "every"
    dense = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    tells = (dense == 0 and parallel_state.get_tensor_model_parallel_rank() == 0) or (
        parallel_state.get_expert_data_parallel_rank() == 0
        and parallel_state.get_expert_tensor_parallel_rank() == 0
    )
    record: dict[str, Any] = {"losses": [], "norms": [], "zeros": [], "lrs": [], "steps": []}
    record["first"] = gather(chunks)
    factors = {1.0} | {r.lr_mult for r in run.config.rules if r.lr_mult is not None}
    record["hashes"] = []
    for step in range(run.steps):
        optimizer.zero_grad()
        # As few micro-batches as accumulation or the pipeline need: TP collectives are slow.
        count = max(2, run.pp)
        micro_batches = tiny_gpt.batch(
            step, global_batch=run.global_batch, micro_batch=run.global_batch // run.dp // count
        )
        record["losses"].append(tiny_gpt.forward_backward(chunks, micro_batches, optimizer))
        gradients = gather(chunks, "main_grad") if keeps_every else None
        record["lrs"].append({factor: lr_of(schedule, run, factor) for factor in factors})
        succeeded, norm, zeros = optimizer.step()
        assert succeeded
        schedule.step(1)
        record["norms"].append(float(norm))
        record["zeros"].append(float(zeros))
        if run.keep == "losses":
            continue
        weights = gather(chunks)
        record["hashes"].append(replica_hashes(chunks))
        if keeps_every and tells:
            record["steps"].append((gradients, weights))
    record["last"] = gather(chunks)
    record["counters"] = [
        (child.exchange.counters, child.plan.loads[child.exchange.rank])
        for child in optimizer.chained_optimizers
        if getattr(child, "exchange", None) is not None
    ]
    record["matrices"] = sum(
        len(child.plan.matrices)
        for child in optimizer.chained_optimizers
        if getattr(child, "exchange", None) is not None and child.exchange.rank == 0
    )
    return record


def replica_hashes(chunks: list[Any]) -> dict[tuple[str, tuple[int, ...]], bytes]:
    """Bytes of every local parameter, by name and the ranks that hold other shards of it."""
    from megatron.core import parallel_state

    found = {}
    for chunk in chunks:
        bare = unwrapped(chunk)
        for name, parameter in bare.named_parameters():
            is_expert = not getattr(parameter, "allreduce", True)
            tp_rank = (
                parallel_state.get_expert_tensor_parallel_rank()
                if is_expert
                else parallel_state.get_tensor_model_parallel_rank()
            )
            cut = getattr(parameter, "tensor_model_parallel", False)
            key = (global_name(bare, name), (tp_rank if cut else 0,))
            found[key] = parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return found


def merged(results: list[dict[str, Any]], run: Run) -> dict[str, Any]:
    """One record of the whole model from those of all pipeline stages and expert ranks."""
    whole = dict(results[0])
    for key in ("first", "last"):
        whole[key] = {n: t for result in results for n, t in result[key].items()}
    whole["steps"] = [
        tuple(
            {n: t for part in step if part is not None for n, t in part[kind].items()}
            for kind in (0, 1)
        )
        for step in zip(*(r["steps"] for r in results if r["steps"]), strict=True)
    ]
    return whole


@dataclass(frozen=True, kw_only=True)
class StepErrors:
    """Largest relative errors of a run against the float64 reference.

    Attributes:
        matrix: Of a matrix's update, over all steps.
        scalar: Of another parameter's update, over all steps.
        norm: Of the gradient norm.
        zeros: Largest difference of the number of zeros in the gradients.
    """

    matrix: float
    scalar: float
    norm: float
    zeros: float


def reference_rule(
    run: Run, record: dict[str, Any], coefficients: Any
) -> ReferenceMuon | ReferenceOrthDion:
    """The float64 rule of a run's matrices."""
    if run.config.optimizer == "dmuon":
        return ReferenceMuon(
            lr=run.lr,
            momentum=run.config.momentum,
            nesterov=run.config.nesterov,
            weight_decay=WEIGHT_DECAY,
            scale_mode=run.config.scale_mode,
            extra_scale_factor=run.config.extra_scale_factor,
            coefficients=coefficients,
        )
    model = ALL_MODELS[run.model]
    sides = {}
    for name, tensor in record["first"].items():
        if is_matrix(name, tensor):
            for number, (label, rows) in enumerate(model.parts(name, tensor.shape).items()):
                smaller = min(len(rows), tensor.shape[1])
                sides[f"{name}[{number}]"] = (name + label, smaller)

    def start(label: str) -> torch.Tensor:
        name, smaller = sides[label]
        rank = math.ceil(round(run.config.rank_fraction * smaller, 9))
        return seeded_right_factor(name, smaller, max(rank, 1)).double()

    return ReferenceOrthDion(
        lr=run.lr,
        momentum=run.config.momentum,
        weight_decay=WEIGHT_DECAY,
        scale_mode=run.config.scale_mode,
        extra_scale_factor=run.config.extra_scale_factor,
        right_factor=run.config.right_factor,
        start=start,
        rank_compensation=run.config.rank_compensation,
    )


def rates_of(run: Run, name: str, tensor: torch.Tensor) -> tuple[float, float]:
    """(factor on the learning rate, weight decay) of a parameter, by the rules of the run."""
    lr, decay = 1.0, 0.0 if tensor.dim() == 1 else WEIGHT_DECAY
    for rule in run.config.rules:
        if fnmatchcase(name, rule.pattern):
            lr = lr if rule.lr_mult is None else rule.lr_mult
            decay = decay if rule.wd_mult is None else WEIGHT_DECAY * rule.wd_mult
    return lr, decay


def errors_against_reference(
    run: Run, record: dict[str, Any], coefficients: list[tuple[float, float, float]]
) -> StepErrors:
    """Compare every step's update with one float64 process given that step's gradients."""
    matrix_rule = reference_rule(run, record, coefficients)
    adamw = ReferenceAdamW(lr=run.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    before = record["first"]
    model = ALL_MODELS[run.model]
    parts = {
        n: list(model.parts(n, t.shape).values()) for n, t in before.items() if is_matrix(n, t)
    }
    worst = {"matrix": 0.0, "scalar": 0.0, "norm": 0.0, "zeros": 0.0}
    for (gradients, weights), lrs, norm, zeros in zip(
        record["steps"], record["lrs"], record["norms"], record["zeros"], strict=True
    ):
        exact = {name: grad.double() for name, grad in gradients.items()}
        clipped, exact_norm = clip(exact, run.clip_grad)
        worst["norm"] = worst_of(worst["norm"], abs(norm / exact_norm - 1.0))
        exact_zeros = sum(int((grad == 0).sum()) for grad in gradients.values())
        worst["zeros"] = worst_of(worst["zeros"], abs(zeros - exact_zeros))
        old = {name: tensor.double() for name, tensor in before.items()}
        matrices = {n: t for n, t in old.items() if n in parts}
        scalars = {n: t for n, t in old.items() if n not in matrices}
        rates = {name: rates_of(run, name, tensor) for name, tensor in old.items()}
        etas = {name: lrs[factor] for name, (factor, _) in rates.items()}
        decays = {name: decay for name, (_, decay) in rates.items()}
        expected = matrix_rule.step(
            matrices, {n: clipped[n] for n in matrices}, parts, lr=etas, weight_decay=decays
        ) | adamw.step(scalars, {n: clipped[n] for n in scalars}, lr=etas, weight_decay=decays)
        for name, update in expected.items():
            got = weights[name].double() - before[name].double()
            kind = "matrix" if name in matrices else "scalar"
            # Without a gradient only weight decay changes anything, and the change is as small as
            # the rounding of fp32 weights: there the weight itself is the measure.
            still = not clipped[name].any()
            off = float((got - update).norm() / (old[name] if still else update).norm())
            worst[kind] = worst_of(worst[kind], off)
        before = weights
    return StepErrors(**worst)
