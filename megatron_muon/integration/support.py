"""What is supported, and the sentences by which everything else is refused at start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from megatron_muon.config import OPTIMIZERS, MatrixConfig
from megatron_muon.linalg import (
    COMPUTE_POLICIES,
    EXCHANGE_POLICIES,
    RIGHT_FACTORS,
    SCALE_MODES,
    STATE_DTYPES,
    coefficient_schedule,
)
from megatron_muon.placement import load_cost_table


class ConfigurationError(ValueError):
    """Everything that is wrong with a configuration, together.

    Attributes:
        problems: One sentence each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(
            f"megatron_muon: {count} configuration problem{'s' if count > 1 else ''}\n{lines}"
        )


def _later(flag: str, instead: str) -> str:
    return f"{flag} is not supported with --optimizer {{optimizer}} yet: {instead}"


_FLAG_PROBLEMS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda a: bool(a.use_precision_aware_optimizer),
        _later("--use-precision-aware-optimizer", "remove the flag (state is fp32)"),
    ),
    (lambda a: bool(a.optimizer_cpu_offload), _later("--optimizer-cpu-offload", "remove the flag")),
    (lambda a: bool(a.optimizer_cuda_graph), _later("--optimizer-cuda-graph", "remove the flag")),
    (
        lambda a: bool(a.use_megatron_fsdp),
        _later("--use-megatron-fsdp", "use --use-distributed-optimizer instead"),
    ),
    (
        lambda a: bool(a.use_torch_fsdp2),
        _later("--use-torch-fsdp2", "use --use-distributed-optimizer instead"),
    ),
    (lambda a: bool(a.fp16), _later("--fp16", "use --bf16")),
    (lambda a: bool(a.fp8_param_gather), _later("--fp8-param-gather", "remove the flag")),
    (
        lambda a: bool(getattr(a, "fp4_param_gather", False)),
        _later("--fp4-param-gather", "remove the flag"),
    ),
    (
        lambda a: bool(a.overlap_param_gather_with_optimizer_step),
        _later("--overlap-param-gather-with-optimizer-step", "use --overlap-param-gather"),
    ),
    (
        lambda a: bool(getattr(a, "use_mup", False)),
        _later("--use-mup", "remove the flag and set --matrix-lr"),
    ),
    (
        lambda a: (
            getattr(a, "tensor_parallel_num_weight_shards", None)
            not in (None, a.tensor_model_parallel_size)
        ),
        _later("--tensor-parallel-num-weight-shards", "remove the flag"),
    ),
    (
        lambda a: bool(getattr(a, "freeze_all_layers", False)),
        _later("--freeze-all-layers", "use --optimizer adam, there is no matrix to train"),
    ),
    (
        lambda a: bool(a.save or a.load) and a.ckpt_format != "torch_dist",
        _later("--ckpt-format other than torch_dist", "type --ckpt-format torch_dist"),
    ),
    (
        lambda a: getattr(a, "non_persistent_ckpt_type", None) not in (None, "global"),
        _later("--non-persistent-ckpt-type other than global", "use global"),
    ),
    (
        lambda a: getattr(a, "ckpt_convert_format", None) not in (None, "torch_dist"),
        _later("--ckpt-convert-format torch", "remove the flag and --ckpt-convert-save"),
    ),
    (
        lambda a: a.muon_tp_mode != "blockwise",
        (
            "--muon-tp-mode chooses between approximations of megatron-core's own muon; "
            "{optimizer} is exact at every tensor-parallel size: remove the flag"
        ),
    ),
    (
        lambda a: a.muon_fp32_matmul_prec != "medium",
        (
            "--muon-fp32-matmul-prec has no effect on {optimizer}: remove the flag (products are "
            "fp32; those of dmuon by --dmuon-compute-dtype)"
        ),
    ),
    (
        lambda a: a.muon_scalar_optimizer != "adam",
        (
            "--muon-scalar-optimizer lion is not supported: {optimizer} trains scalar parameters "
            "with Adam, remove the flag"
        ),
    ),
)


def flag_problems(args: Any, *, data_parallel_size: int) -> list[str]:
    """Flags of Megatron that cannot go with the matrix optimizer.

    Args:
        args: Megatron's arguments before ``validate_args``.
        data_parallel_size: Data-parallel times context-parallel size.
    """
    problems = [
        sentence.format(optimizer=args.optimizer)
        for is_wrong, sentence in _FLAG_PROBLEMS
        if is_wrong(args)
    ]
    if (args.num_distributed_optimizer_instances or 1) > 1 and find_spec("einops") is None:
        problems.append(
            "--num-distributed-optimizer-instances > 1 needs the package einops, which "
            "megatron-core imports without declaring it: pip install einops"
        )
    if not args.use_distributed_optimizer and data_parallel_size > 1:
        problems.append(
            f"--optimizer {args.optimizer} at data-parallel size {data_parallel_size} needs "
            "Megatron's distributed optimizer: add --use-distributed-optimizer"
        )
    return problems


def setting_problems(settings: MatrixConfig) -> list[str]:
    """Values of the matrix optimizer's own settings that are out of range."""
    flags = "--muon" if settings.optimizer == "dmuon" else "--orth-dion"
    problems = []
    if settings.optimizer not in OPTIMIZERS:
        problems.append(
            f"MatrixConfig.optimizer is '{settings.optimizer}'; supported are "
            f"{', '.join(OPTIMIZERS)}"
        )
    if settings.scale_mode not in SCALE_MODES:
        problems.append(
            f"{flags}-scale-mode is '{settings.scale_mode}'; supported are {', '.join(SCALE_MODES)}"
        )
    if not 0.0 <= settings.momentum < 1.0:
        problems.append(f"{flags}-momentum is {settings.momentum}; it must be >= 0 and < 1")
    if settings.optimizer == "orth_dion":
        problems += _orth_dion_problems(settings)
    if settings.compute_dtype not in COMPUTE_POLICIES:
        problems.append(
            f"--dmuon-compute-dtype is '{settings.compute_dtype}'; supported are "
            f"{', '.join(COMPUTE_POLICIES)}"
        )
    if settings.exchange_dtype not in EXCHANGE_POLICIES:
        problems.append(
            f"--dmuon-exchange-dtype is '{settings.exchange_dtype}'; supported are "
            f"{', '.join(EXCHANGE_POLICIES)}"
        )
    if not 0.0 < settings.exchange_buffer_mb * 2**20 < float("inf"):
        problems.append(
            f"--matrix-exchange-buffer-mb is {settings.exchange_buffer_mb:g}; it must be a number "
            "> 0"
        )
    problems += _placement_problems(settings)
    if settings.min_dim < 1:
        problems.append(f"--matrix-min-dim is {settings.min_dim}; it must be an integer >= 1")
    for flag, value in (
        ("--matrix-lr", settings.lr),
        ("--matrix-min-lr", settings.min_lr),
        ("--matrix-weight-decay", settings.weight_decay),
        ("--muon-extra-scale-factor", settings.extra_scale_factor),
    ):
        if value is not None and not 0.0 <= value < float("inf"):
            problems.append(f"{flag} is {value}; it must be a number >= 0")
    return problems


def _placement_problems(settings: MatrixConfig) -> list[str]:
    problems = []
    if settings.split_ranks < 1:
        problems.append(
            f"--dmuon-split-ranks is {settings.split_ranks}; it must be an integer >= 1, and 1 "
            "splits no matrix"
        )
    if not 0.0 <= settings.split_min_gflop < float("inf"):
        problems.append(
            f"--dmuon-split-min-gflop is {settings.split_min_gflop:g}; it must be a number >= 0"
        )
    if settings.ranks_per_node is not None and settings.ranks_per_node < 1:
        problems.append(
            f"--matrix-ranks-per-node is {settings.ranks_per_node}; it must be an integer >= 1"
        )
    if settings.cost_table is not None:
        try:
            load_cost_table(settings.cost_table)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _orth_dion_problems(settings: MatrixConfig) -> list[str]:
    problems = []
    if not 0.0 < settings.rank_fraction <= 1.0:
        problems.append(
            f"--orth-dion-rank-fraction is {settings.rank_fraction:g}; it must be > 0 and <= 1"
        )
    if settings.rank_multiple_of < 1:
        problems.append(
            f"--orth-dion-rank-multiple-of is {settings.rank_multiple_of}; it must be an integer "
            ">= 1"
        )
    for flag, value, choices in (
        ("right-factor", settings.right_factor, RIGHT_FACTORS),
        ("exchange", settings.exchange, ("auto", "factors", "matrix")),
        ("state-dtype", settings.state_dtype, tuple(STATE_DTYPES)),
    ):
        if value not in choices:
            problems.append(f"--orth-dion-{flag} is '{value}'; supported are {', '.join(choices)}")
    return problems


def coefficient_problems(settings: MatrixConfig) -> list[str]:
    """A coefficient set, or a number of steps of it, that does not exist."""
    if settings.optimizer != "dmuon":
        return []
    try:
        coefficient_schedule(
            settings.coefficient_type, settings.num_ns_steps, settings.coefficients
        )
    except ValueError as error:
        return [str(error)]
    return []


def learning_rate_problems(
    settings: MatrixConfig, *, lr: float | None, min_lr: float | None
) -> list[str]:
    """Matrices whose minimum learning rate would be above their maximum.

    Args:
        settings: Settings of the matrix optimizer.
        lr: Adam's maximum, which matrices share unless set apart.
        min_lr: Adam's minimum, likewise.
    """
    highest = settings.lr if settings.lr is not None else lr
    lowest = settings.min_lr if settings.min_lr is not None else min_lr
    if highest is None or lowest is None or not 0.0 <= highest < lowest:
        return []
    return [
        (
            f"the learning rate of matrices has its maximum at {highest:g} and its minimum at "
            f"{lowest:g}: set --matrix-min-lr (or --min-lr) at or below --matrix-lr (or --lr)"
        )
    ]


def config_problems(
    config: Any,
    settings: MatrixConfig,
    model_chunks: Sequence[Any],
) -> list[str]:
    """What is wrong for ``get_matrix_optimizer``, whoever calls it.

    Args:
        config: Megatron's ``OptimizerConfig``.
        settings: Settings of the matrix optimizer.
        model_chunks: The wrapped model chunks.
    """
    problems = [*coefficient_problems(settings), *setting_problems(settings)]
    problems += learning_rate_problems(settings, lr=config.lr, min_lr=config.min_lr)
    if config.optimizer != "adam":
        problems.append(
            f"OptimizerConfig.optimizer is '{config.optimizer}': scalar parameters are trained "
            "with Adam, set optimizer='adam'"
        )
    wrapped = [chunk for chunk in model_chunks if hasattr(chunk, "ddp_config")]
    if len(wrapped) < len(model_chunks):
        problems.append("wrap every model chunk in megatron.core DistributedDataParallel first")
    if not config.use_distributed_optimizer or not all(
        chunk.ddp_config.use_distributed_optimizer for chunk in wrapped
    ):
        problems.append(
            "the matrix optimizer needs Megatron's distributed optimizer: set "
            "use_distributed_optimizer=True in OptimizerConfig and DistributedDataParallelConfig"
        )
    if any(chunk.ddp_config.use_megatron_fsdp for chunk in wrapped):
        problems.append("Megatron-FSDP is not supported: use DistributedDataParallel without it")
    for field in (
        "fp16",
        "use_precision_aware_optimizer",
        "optimizer_cpu_offload",
        "optimizer_cuda_graph",
        "overlap_param_gather_with_optimizer_step",
    ):
        if getattr(config, field, False):
            problems.append(f"OptimizerConfig.{field} is not supported yet: set it to False")
    return problems
