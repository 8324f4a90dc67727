"""A run of ``megatron.training.pretrain`` on one rank, for tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SEQ, VOCAB, GLOBAL_BATCH = 16, 64, 8

NOT_DISTRIBUTED = "without --use-distributed-optimizer"
"""Among the flags of a run: it has megatron-core's plain optimizer."""


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(VOCAB, (SEQ + 1,), generator=generator)
        return {"tokens": text[:-1], "labels": text[1:], "position_ids": torch.arange(SEQ)}


def flags(
    load: Path, save: Path, tp: int, pp: int, iterations: int, extra: Sequence[str]
) -> list[str]:
    from megatron_muon import cpu

    mine = f"""
        --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --swiglu --disable-bias-linear
        --num-attention-heads 4 --group-query-attention --num-query-groups 2
        --normalization RMSNorm --position-embedding-type rope
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --tokenizer-type NullTokenizer --vocab-size {VOCAB} --make-vocab-size-divisible-by 1
        --seq-length {SEQ} --max-position-embeddings {SEQ}
        --micro-batch-size 2 --global-batch-size {GLOBAL_BATCH} --train-iters {iterations}
        --lr 1e-2 --lr-decay-style constant --log-interval 1 --eval-iters 0 --eval-interval 100
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
        --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}
        --load {load} --save {save} --save-interval 100 --ckpt-format torch_dist
    """
    if not any("param-scheduler" in word for word in extra):
        mine += "--override-opt_param-scheduler"
    given = [*mine.split(), *extra]
    if NOT_DISTRIBUTED in given:
        left_out = (NOT_DISTRIBUTED, "--use-distributed-optimizer", "--overlap-param-gather")
        given = [flag for flag in given if flag not in left_out]
    sequence_parallel = ["--sequence-parallel"] if tp > 1 else []
    return [*cpu.default_flags(), *sequence_parallel, *given]


def pretrain(
    rank: int,
    load: Path,
    save: Path,
    tp: int,
    pp: int,
    iterations: int,
    extra: Sequence[str] = ("--dist-ckpt-optim-fully-reshardable",),
) -> list[float]:
    """Losses of the micro-batches that this rank saw, in order."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain as run
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    losses: list[float] = []

    def datasets(samples: Any, vp_stage: int | None = None) -> tuple[Text, Text, Text]:
        return Text(), Text(), Text()

    def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
        part = next(data)

        def mean_loss(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            total, tokens = values.float().sum(), torch.tensor(values.numel(), dtype=torch.int)
            losses.append(float(total / tokens))
            return total, tokens, {"lm loss": torch.stack([total.detach(), tokens])}

        output = model(part["tokens"], part["position_ids"], None, labels=part["labels"])
        return output, mean_loss

    datasets.is_distributed = True  # type: ignore[attr-defined]
    sys.argv = ["pretrain", *flags(load, save, tp, pp, iterations, extra)]
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    run(config, datasets, ModelType.encoder_or_decoder, forward_step)
    return losses


def pretrain_with_our_hooks(rank: int, *args: Any) -> tuple[list[float], Any]:
    """``pretrain`` with our hooks installed: losses, and the optimizer that Megatron built."""
    import megatron_muon

    megatron_muon.install()
    from megatron.training import training

    built = []
    original = training.get_megatron_optimizer

    def remembers(*positional: Any, **named: Any) -> Any:
        built.append(original(*positional, **named))
        return built[-1]

    training.get_megatron_optimizer = remembers
    losses = pretrain(rank, *args)
    (optimizer,) = built
    return losses, optimizer


def of_step(per_rank: list[list[float]], step: int, steps: int) -> float:
    """Mean loss of one step over the ranks that saw losses, which is that of the global batch."""
    seen = [losses[step * len(losses) // steps :] for losses in per_rank if losses]
    count = len(next(losses for losses in per_rank if losses)) // steps
    return sum(sum(losses[:count]) / count for losses in seen) / len(seen)
