"""``run_config.yaml``, which Megatron-Bridge writes where Megatron-LM saves its arguments.

Its sections are dataclasses: ``model`` has the fields of ``TransformerConfig`` itself, or in a
section ``transformer`` of its own; ``optimizer`` and ``ddp`` those of ``OptimizerConfig`` and
``DistributedDataParallelConfig``. Most have the name of the argument.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from megatron_muon.offline.errors import CheckpointError

RUN_CONFIG_FILE = "run_config.yaml"

_KINDS: Final = {
    "true or false": (
        *("attention_output_gate", "gated_linear_unit", "moe_grouped_gemm", "muon_nesterov"),
        "use_distributed_optimizer",
    ),
    "a positive whole number": (
        *("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "q_lora_rank"),
        *("kv_lora_rank", "qk_head_dim", "v_head_dim"),
    ),
    "a number": ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"),
}
"""What the fields must be that are used here; YAML takes 'no' and 1e-8 for text."""


def add_run_config_flag(parser: argparse.ArgumentParser) -> None:
    """The flag of every command that must know how the model is made."""
    parser.add_argument(
        "--run-config",
        type=Path,
        metavar="FILE",
        help=f"a {RUN_CONFIG_FILE} of Megatron-Bridge, or a few lines like one, for what the "
        "checkpoint itself does not say; default: the one that is in it",
    )


def read_run_config(path: Path) -> dict[str, Any]:
    """All plain values of the sections that are used, by name.

    Args:
        path: The file.

    Raises:
        CheckpointError: It cannot be read, or is no such file.
    """
    try:
        import yaml  # not needed for any other file
    except ImportError as error:
        raise CheckpointError(
            f"{path} can be read with PyYAML only: pip install pyyaml."
        ) from error
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}).") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} cannot be read as YAML: {text}.") from error
    model = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(model, Mapping):
        raise CheckpointError(f"{path} is no {RUN_CONFIG_FILE}: it has no section 'model'.")
    # What several sections say (bf16, …) is the same in all; the model's own word comes last.
    sections = (content.get("ddp"), content.get("optimizer"), model, model.get("transformer"))
    found = {
        str(name): value
        for section in sections
        if isinstance(section, Mapping)
        for name, value in section.items()
        if value is not None and not isinstance(value, Mapping)
    }
    wrong = [
        f"{name} is {found[name]!r} and must be {kind}"
        for kind, names in _KINDS.items()
        for name in names
        if name in found and not _is(found[name], kind)
    ]
    if wrong:
        raise CheckpointError(f"{path}: {'; '.join(wrong)}.")
    return found


def _is(value: Any, kind: str) -> bool:
    if kind == "true or false" or isinstance(value, bool):
        return kind == "true or false" and isinstance(value, bool)
    if kind == "a number":
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, int) and value > 0
