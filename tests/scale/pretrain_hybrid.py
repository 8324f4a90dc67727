"""Megatron's ``pretrain_hybrid.py`` up to the optimizer: a hybrid model, configured by flags."""

from typing import Any

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import (
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args


def never(*_: Any) -> Any:
    """Datasets and forward steps come after the optimizer."""
    raise AssertionError("a dry run ends with the optimizer")


if __name__ == "__main__":
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))
    pretrain(config, never, ModelType.encoder_or_decoder, never)
