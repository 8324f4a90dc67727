"""An ordinary Megatron pretraining script: a GPT on an indexed dataset, configured by flags.

It is independent of megatron_muon and, like any script, run by the launcher:

    torchrun ... -m megatron_muon.launch examples/pretrain_gpt_small.py <Megatron's flags>
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

Batch = dict[str, torch.Tensor]
LossReport = tuple[torch.Tensor, torch.Tensor, Batch]


def build_datasets(
    samples: tuple[int, int | None, int], vp_stage: int | None = None
) -> list[GPTDataset | None]:
    """Build the train, validation and test sets of `--data-path` and `--split`.

    Every rank reads its own samples, the same within a tensor-parallel group: for a mapped file
    that costs less than a broadcast.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        # Causal attention requires no explicit mask.
        create_attention_mask=False,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config)
    datasets: list[GPTDataset | None] = builder.build()
    return datasets


def next_batch(data: Iterator[Batch], vp_stage: int | None) -> dict[str, torch.Tensor | None]:
    """Return the tensors of one micro-batch, on the device; all None inside a pipeline."""
    keys = ("tokens", "position_ids", "labels", "loss_mask")
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(keys)
    batch = next(data)
    return {key: batch[key].cuda(non_blocking=True) for key in keys}


def masked_loss(loss_mask: torch.Tensor | None, losses: torch.Tensor) -> LossReport:
    """Return the sum of the token losses, the number of tokens, and both for the log."""
    # Megatron computes the loss on the last stage only, which has the batch.
    assert loss_mask is not None
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens])}


def forward_step(
    data: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossReport]]:
    """Run one micro-batch through this rank's part of the model."""
    timers: Any = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next_batch(data, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, functools.partial(masked_loss, batch["loss_mask"])


def main() -> None:
    """Parse the flags, build the model and train."""
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    # Tells Megatron to build the datasets on all ranks.
    build_datasets.is_distributed = True  # type: ignore[attr-defined]
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
