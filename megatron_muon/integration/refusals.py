"""Settings of Megatron that are refused: one table, for the command line and for the API.

Megatron makes its configurations from the arguments of the command line, field by field under the
same name. So a row names an attribute of the arguments and a field of ``OptimizerConfig``,
``DistributedDataParallelConfig`` or the model's configuration alike, and is asked of whichever has
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

import torch

LATER = "is not supported with {optimizer} yet"
NVFP4 = (
    "is not supported: packed NVFP4 weights are padded by themselves, so that a rank's part of "
    "them is not that of its gradients at every data-parallel size"
)
IDLE = "has no effect on {optimizer}"
WRITES = "writes weights without the optimizer, which keeps fp32 masters of them, and " + LATER


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One setting.

    Attributes:
        name: Attribute of the arguments, and field of a configuration.
        reason: What is wrong with it; ``{optimizer}`` stands for the optimizer.
        advice: What to do on the command line.
        allowed: Values that are not refused; the default first.
        when: Whether the arguments or configuration are wrong, where values do not say it.
        flag: As it is typed, where that is not the name with dashes.
    """

    name: str
    reason: str = LATER
    advice: str = "remove the flag"
    allowed: tuple[Any, ...] = (False, None)
    when: Callable[[Any], bool] | None = None
    flag: str = ""

    @property
    def typed(self) -> str:
        """The flag."""
        off = "no-" if self.allowed[0] is True else ""
        return self.flag or f"--{off}{self.name.replace('_', '-')}"

    def holds(self, settings: Any) -> bool:
        """Whether the arguments or a configuration are to be refused."""
        if not hasattr(settings, self.name):
            return False
        if self.when is not None:
            return self.when(settings)
        value = getattr(settings, self.name)
        return not any(value is fine or value == fine for fine in self.allowed)


def _shards(name: str, size: Callable[[Any], int | None]) -> Refusal:
    return Refusal(
        name=name, allowed=(None,), when=lambda s: getattr(s, name) not in (None, size(s) or 1)
    )


def _idle(*names: str, allowed: tuple[Any, ...] = (False,)) -> tuple[Refusal, ...]:
    return tuple(Refusal(name=name, reason=IDLE, allowed=allowed) for name in names)


def _keeps_fp8(settings: Any) -> bool:
    """Whether weights are kept in FP8, by the arguments or by a model's configuration."""
    return any(bool(getattr(settings, n, False)) for n in ("fp8_param_gather", "fp8_param"))


FP32 = (torch.float32, "fp32")

REFUSALS: tuple[Refusal, ...] = (
    # ---- what the optimizer cannot do, or not yet
    Refusal(
        name="use_precision_aware_optimizer",
        reason="keeps masters and scaled state inside Transformer Engine's Adam, and " + LATER,
        advice="remove the flag (state is fp32; of dmuon see --matrix-momentum-dtype)",
    ),
    *(
        Refusal(name=name, advice="remove the flag (state is fp32)", allowed=FP32)
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    Refusal(
        name="optimizer_cpu_offload",
        reason="knows Adam and SGD only, and " + LATER,
    ),
    Refusal(name="optimizer_cuda_graph"),
    Refusal(name="use_megatron_fsdp", advice="use --use-distributed-optimizer instead"),
    Refusal(name="use_custom_fsdp", advice="use --use-distributed-optimizer instead"),
    Refusal(name="use_torch_fsdp2", advice="use --use-distributed-optimizer instead"),
    Refusal(name="use_layer_wise_distributed_optimizer"),
    *(Refusal(name=name, reason=NVFP4) for name in ("fp4_param_gather", "fp4_param")),
    Refusal(
        name="fp8_recipe",
        reason="is not supported with quantized weights, whose form it leaves open",
        advice="use delayed, tensorwise, blockwise or mxfp8, or remove --fp8-param-gather",
        allowed=("delayed",),
        when=lambda s: _keeps_fp8(s) and s.fp8_recipe == "custom",
        flag="--fp8-recipe custom",
    ),
    Refusal(
        name="reuse_grad_buf_for_mxfp8_param_ag",
        reason="is needed by --fp8-param-gather with --fp8-recipe mxfp8: Transformer Engine cannot "
        "put MXFP8 weights into a buffer of their own",
        advice="add it",
        allowed=(False, True),
        when=lambda s: (
            _keeps_fp8(s)
            and getattr(s, "fp8_recipe", None) == "mxfp8"
            and not s.reuse_grad_buf_for_mxfp8_param_ag
        ),
        flag="--reuse-grad-buf-for-mxfp8-param-ag",
    ),
    Refusal(
        name="moe_single_grouped_weight",
        reason="is not supported with quantized weights",
        advice="remove the flag, or --fp8-param-gather",
        when=lambda s: bool(s.moe_single_grouped_weight) and _keeps_fp8(s),
    ),
    Refusal(name="overlap_param_gather_with_optimizer_step", advice="use --overlap-param-gather"),
    Refusal(name="use_mup", advice="remove the flag and set --matrix-lr"),
    _shards("tensor_parallel_num_weight_shards", lambda s: s.tensor_model_parallel_size),
    _shards(
        "expert_tensor_parallel_num_weight_shards",
        lambda s: s.expert_tensor_parallel_size or s.tensor_model_parallel_size,
    ),
    Refusal(
        name="freeze_all_layers",
        advice="use --optimizer adam, there is no matrix to train",
    ),
    Refusal(
        name="num_distributed_optimizer_instances",
        reason="> 1 needs the package einops, which megatron-core imports without declaring it",
        advice="pip install einops",
        allowed=(1, None),
        when=lambda s: (
            (s.num_distributed_optimizer_instances or 1) > 1 and find_spec("einops") is None
        ),
    ),
    Refusal(
        name="decoupled_weight_decay",
        reason="cannot be off with {optimizer}, whose matrices have decoupled weight decay",
        allowed=(True,),
    ),
    # ---- what changes weights behind the optimizer
    Refusal(name="qk_clip", reason=WRITES),
    Refusal(name="init_model_with_meta_device", reason="leaves weights uninitialized without FSDP"),
    Refusal(name="flextron", reason=WRITES),
    Refusal(name="perform_rl_step", reason=WRITES),
    Refusal(
        name="vision_pretraining_type",
        reason=WRITES,
        allowed=("classify", "inpaint", None),
        flag="--vision-pretraining-type dino",
    ),
    *(Refusal(name=name, reason=WRITES) for name in ("bert_load", "ict_load", "moe_use_upcycling")),
    # ---- checkpoints
    Refusal(
        name="ckpt_format",
        advice="type --ckpt-format torch_dist",
        when=lambda s: bool(s.save or s.load) and s.ckpt_format != "torch_dist",
        flag="--ckpt-format other than torch_dist",
    ),
    Refusal(
        name="non_persistent_ckpt_type",
        advice="use global",
        allowed=("global", None),
        flag="--non-persistent-ckpt-type other than global",
    ),
    Refusal(
        name="ckpt_convert_format",
        advice="remove the flag and --ckpt-convert-save",
        allowed=("torch_dist", None),
        flag="--ckpt-convert-format torch",
    ),
    # ---- megatron-core's own muon, and other optimizers
    Refusal(
        name="muon_tp_mode",
        reason=(
            "chooses between approximations of megatron-core's own muon; {optimizer} is exact at "
            "every tensor-parallel size"
        ),
        allowed=("blockwise",),
    ),
    Refusal(
        name="muon_fp32_matmul_prec",
        reason=IDLE,
        advice="remove the flag (products are fp32; those of dmuon by --dmuon-compute-dtype)",
        allowed=("medium",),
    ),
    Refusal(
        name="muon_scalar_optimizer",
        reason="is not supported: {optimizer} trains scalar parameters with Adam",
        allowed=("adam",),
        flag="--muon-scalar-optimizer lion",
    ),
    *_idle("sgd_momentum", allowed=(0.9,)),
    *_idle("lion_beta1", "soap_shampoo_beta", "adaptive_muon_beta2", allowed=(0.95,)),
    *_idle("lion_beta2", allowed=(0.98,)),
    *_idle("soap_precondition_frequency", allowed=(1,)),
    *_idle("soap_use_kl_shampoo", allowed=(True,)),
    *_idle("adaptive_muon_moment2_method", allowed=("adamuon",)),
    *_idle("adaptive_muon_eps", allowed=(1e-8,)),
    # ---- details of what is refused above; Megatron's parser has other defaults for some
    *_idle("store_param_remainders", "pin_cpu_grads", "pin_cpu_params", allowed=(True,)),
    *_idle("optimizer_offload_fraction", allowed=(0.0, 1.0)),
    *_idle("use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"),
    *_idle("data_parallel_sharding_strategy", allowed=("no_shard", "optim_grads_params")),
    *_idle("outer_dp_sharding_strategy", allowed=("no_shard",)),
    *_idle("gradient_reduce_div_fusion", "fsdp_all_gather_in_start_param_sync", allowed=(True,)),
    *_idle("suggested_communication_unit_size", allowed=(None,)),
    *_idle("megatron_fsdp_main_params_dtype", allowed=FP32),
    *_idle(
        "megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype", allowed=(None, "auto")
    ),
    *_idle(
        "keep_fp8_transpose_cache",
        "fsdp_double_buffer",
        "fsdp_db_use_persist_buf_on_alloc_fail",
        "fsdp_manual_registration",
        "megatron_fsdp_use_decoupled_grad",
        "megatron_fsdp_cuda_graph_mode",
        "megatron_fsdp_enable_fine_grained_param_gather",
        "megatron_fsdp_max_pool_double_buffer",
    ),
)

USED = frozenset(
    {
        # ---- OptimizerConfig: by Megatron, as for its Adam
        *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay"),
        *("apply_wd_to_qk_layernorm", "adam_beta1", "adam_beta2", "adam_eps", "optimizer"),
        *("bf16", "fp16", "params_dtype", "loss_scale", "initial_loss_scale"),
        *("min_loss_scale", "loss_scale_window", "hysteresis", "clip_grad"),
        *("grad_norm_skip_threshold", "log_num_zeros_in_grad", "barrier_with_L1_time", "timers"),
        *("config_logger_dir", "use_distributed_optimizer", "overlap_param_gather"),
        # ---- OptimizerConfig: by us
        *("muon_momentum", "muon_nesterov", "muon_scale_mode", "muon_extra_scale_factor"),
        *("muon_coefficient_type", "muon_num_ns_steps", "muon_split_qkv"),
        # ---- DistributedDataParallelConfig
        *("grad_reduce_in_fp32", "overlap_grad_reduce", "align_param_gather", "bucket_size"),
        *("check_for_nan_in_grad", "num_buckets", "fp8_param_gather"),
        *("check_for_large_grads", "pad_buckets_for_high_nccl_busbw", "average_in_collective"),
        *("reduce_scatter_with_fp32_accumulation", "delay_wgrad_compute", "nccl_ub"),
        *("param_name_patterns_for_fp32_local_accumulation", "disable_symmetric_registration"),
    }
)
"""Fields of Megatron's two configurations that have their meaning; those of a later version that
are in neither table must have their defaults."""


def flag_refusals(args: Any) -> Iterator[str]:
    """A sentence for every flag that is refused.

    Args:
        args: Megatron's arguments before ``validate_args``.
    """
    for row in REFUSALS:
        if row.holds(args):
            reason = row.reason.format(optimizer=args.optimizer)
            yield f"{row.typed} {reason}: {row.advice}"


def config_refusals(
    optimizer_config: Any, ddp_configs: Sequence[Any], model_configs: Sequence[Any], optimizer: str
) -> Iterator[str]:
    """A sentence for every field that is refused.

    Args:
        optimizer_config: Megatron's ``OptimizerConfig``.
        ddp_configs: ``DistributedDataParallelConfig`` of every model chunk.
        model_configs: Configuration of every model chunk.
        optimizer: ``dmuon`` or ``orth_dion``.
    """
    for config in (optimizer_config, *ddp_configs, *model_configs):
        for row in REFUSALS:
            if row.holds(config):
                reason = row.reason.format(optimizer=optimizer)
                yield _sentence(config, row.name, reason, row.allowed[0])
    named = USED | {row.name for row in REFUSALS}
    for config in (optimizer_config, *ddp_configs):
        unknown = {f.name: f.default for f in fields(config) if f.name not in named}
        for name, default in unknown.items():
            if getattr(config, name) != default:
                reason = "is not known to this version of megatron_muon"
                yield _sentence(config, name, reason, default)


def _sentence(config: Any, name: str, reason: str, default: Any) -> str:
    value = getattr(config, name)
    return f"{type(config).__name__}.{name} is {value!r}; it {reason}: set it to {default!r}"
