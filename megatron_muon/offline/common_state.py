"""The common state of a checkpoint, and ``run_config.yaml``, which Megatron-Bridge writes instead.

Megatron-LM saves its arguments in the common state, Megatron-Bridge saves sections in a file:
``model`` has the fields of ``TransformerConfig``, or a section ``transformer`` with them;
``optimizer`` and ``ddp`` have those of ``OptimizerConfig`` and ``DistributedDataParallelConfig``.
Most fields are named like the argument.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from megatron_muon.offline.errors import CheckpointError, first_line
from megatron_muon.offline.safe_pickle import Loaded, require_known

RUN_CONFIG_FILE = "run_config.yaml"


@dataclass(frozen=True, kw_only=True)
class CommonState:
    """State common to all ranks: arguments, iteration, parameter groups, scheduler.

    Attributes:
        in_file: True for the file ``common.pt`` (up to megatron-core 0.18), False for an entry of
            the DCP checkpoint (since 0.19).
        loaded: The state; its value is a dict.
        run_config: Content of ``run_config.yaml``, or None.
    """

    in_file: bool
    loaded: Loaded
    run_config: Mapping[str, Any] | None = None

    @property
    def value(self) -> dict[str, Any]:
        """The state as a dict."""
        found: dict[str, Any] = self.loaded.value
        return found

    def rewritable(self, what: str) -> dict[str, Any]:
        """Return a copy to modify and save; refuse one that names unknown packages."""
        require_known(self.loaded, what)
        return dict(self.value)

    def argument(self, name: str, default: Any = None) -> Any:
        """Return a saved argument, else the value in ``run_config.yaml``, else the default."""
        found = getattr(self.value.get("args"), name, None)
        return (self.run_config or {}).get(name, default) if found is None else found

    def required(self, name: str, section: str) -> Any:
        """Return an argument without a default; ``section`` of ``run_config.yaml`` may have it."""
        found = self.argument(name)
        if found is None:
            raise CheckpointError(f"the checkpoint does not say {self.missing(name, section)}.")
        return found

    def missing(self, name: str, section: str) -> str:
        """Return the end of an error on a missing argument: where it is expected, what to type."""
        where = f"there are neither saved arguments nor a {RUN_CONFIG_FILE}"
        if self.value.get("args") is not None:
            where = "it is not among the saved arguments"
        elif self.run_config is not None:
            where = f"it is not in {RUN_CONFIG_FILE}"
        return (
            f"{name} ({where}): name a file with --run-config that has '{section}: {{{name}: …}}'"
        )


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
"""Types of the fields in use; YAML reads 1e-8 as text."""


def add_run_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag of every command that needs the model's configuration."""
    parser.add_argument(
        "--run-config",
        type=Path,
        metavar="FILE",
        help=f"a {RUN_CONFIG_FILE} of Megatron-Bridge, or a few lines in its format, for settings "
        "that the checkpoint does not contain; default: the one in the checkpoint",
    )


def read_run_config(path: Path) -> dict[str, Any]:
    """Return all plain values of the sections in use, by name."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}).") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as YAML: {first_line(error)}.") from error
    model = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(model, Mapping):
        raise CheckpointError(f"{path} is not a {RUN_CONFIG_FILE}: it has no section 'model'.")
    # A field of several sections (bf16, …) has one value; the model's takes precedence.
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
