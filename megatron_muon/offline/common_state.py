"""What all ranks of a run share, and what it says of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.run_config import RUN_CONFIG_FILE
from megatron_muon.offline.safe_pickle import Loaded


@dataclass(frozen=True, kw_only=True)
class CommonState:
    """What all ranks share: arguments, iteration, parameter groups, scheduler.

    Attributes:
        in_file: True when it is the file ``common.pt`` (up to megatron-core 0.18), False when it is
            an entry of the DCP checkpoint (since 0.19).
        loaded: The state; its value is a dict.
        run_config: What ``run_config.yaml`` says, None without one.
    """

    in_file: bool
    loaded: Loaded
    run_config: Mapping[str, Any] | None = None

    @property
    def value(self) -> dict[str, Any]:
        """The dict."""
        found: dict[str, Any] = self.loaded.value
        return found

    def argument(self, name: str, default: Any = None) -> Any:
        """One of the arguments of the run that saved, else what its ``run_config.yaml`` says."""
        found = getattr(self.value.get("args"), name, None)
        return (self.run_config or {}).get(name, default) if found is None else found

    def required(self, name: str, section: str) -> Any:
        """The same, where nothing must be guessed.

        Args:
            name: Of the argument.
            section: Of ``run_config.yaml`` that has it.

        Raises:
            CheckpointError: It is not said.
        """
        found = self.argument(name)
        if found is None:
            raise CheckpointError(f"the checkpoint does not say {self.unsaid(name, section)}.")
        return found

    def unsaid(self, name: str, section: str) -> str:
        """A name that is not said, where it would be, and what to type."""
        where = f"there are neither saved arguments nor a {RUN_CONFIG_FILE}"
        if self.value.get("args") is not None:
            where = "it is not among the saved arguments"
        elif self.run_config is not None:
            where = f"it is not in {RUN_CONFIG_FILE}"
        return (
            f"{name} ({where}): name a file with --run-config that has '{section}: {{{name}: …}}'"
        )
