"""Megatron's flags about the schedule at a load, for groups that carry rates of their own.

Megatron's scheduler decides by these flags whose values hold, this run's or the checkpoint's, but
each param group of 0.19 carries rates as well, which come before the scheduler's and of which the
scheduler knows nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megatron_muon.integration.support import CheckpointMismatchError

RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""What the scheduler looks up in a group before it takes its own."""

OVERRIDE, TAKE_SAVED = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"

Rates = tuple[tuple[str, float], ...]
Kind = tuple[tuple[str, Any], ...]


def _rates(group: Mapping[str, Any]) -> Rates:
    return tuple((key, group[key]) for key in RATES if group.get(key) is not None)


def _kind(group: Mapping[str, Any]) -> Kind:
    """What tells groups apart besides their rates: optimizer, experts, factor on weight decay."""
    return tuple((key, group.get(key)) for key in param_group_identifier_keys if key not in RATES)


@dataclass(frozen=True, kw_only=True)
class LoadedRates:
    """Rates of this run's groups, on all ranks, and of those of the checkpoint that was loaded.

    Attributes:
        here: Kind of a group to the rates that groups of it have.
        saved: The same of the checkpoint.
    """

    here: Mapping[Kind, frozenset[Rates]]
    saved: Mapping[Kind, frozenset[Rates]]

    @classmethod
    def of(
        cls, here: Iterable[Mapping[str, Any]], saved: Iterable[Mapping[str, Any]]
    ) -> LoadedRates:
        """From the groups of all ranks and those of a checkpoint."""
        return cls(here=_by_kind(here), saved=_by_kind(saved))

    def saved_for(self, group: Mapping[str, Any]) -> Rates | None:
        """The checkpoint's rates of a group; None where it has none, or does not say which."""
        kind = _kind(group)
        saved = self.saved.get(kind, frozenset())
        if saved == self.here[kind]:
            return _rates(group)
        return next(iter(saved)) if len(saved) == 1 else None

    def problems(self) -> list[str]:
        """A sentence for every group of one side whose rates no group of its kind has there."""
        return [
            f"{_name(kind)} with {_listed(rates)} here, and in the checkpoint "
            + (" or ".join(map(_listed, sorted(self.saved.get(kind, ())))) or "no such group")
            for kind, found in self.here.items()
            for rates in sorted(found - self.saved.get(kind, frozenset()))
        ] + self.lost()

    def lost(self) -> list[str]:
        """A sentence for every group of the checkpoint of a kind that this run does not have.

        A conversion may leave groups of an optimizer that trains nothing here.
        """
        here = {_trained_by(kind) for kind in self.here}
        return [
            f"{_name(kind)} with {_listed(rates)} in the checkpoint, and no such group here"
            for kind, found in self.saved.items()
            if kind not in self.here and _trained_by(kind) in here
            for rates in sorted(found)
        ]


def _trained_by(kind: Kind) -> tuple[Any, bool]:
    values = dict(kind)
    return values.get("optimizer"), bool(values.get("is_expert_parallel"))


def _by_kind(groups: Iterable[Mapping[str, Any]]) -> dict[Kind, frozenset[Rates]]:
    found: dict[Kind, set[Rates]] = {}
    for group in groups:
        found.setdefault(_kind(group), set()).add(_rates(group))
    return {kind: frozenset(rates) for kind, rates in found.items()}


def _name(kind: Kind) -> str:
    values = dict(kind)
    experts = " of experts" if values.get("is_expert_parallel") else ""
    decay = f", weight decay x {values['wd_mult']:.15g}" if values.get("wd_mult") != 1.0 else ""
    return f"a group of {values.get('optimizer') or 'adam'}{experts}{decay}"


def _listed(rates: Rates) -> str:
    return ", ".join(f"{key} {value:.15g}" for key, value in rates)


def with_rates_of_groups(load_state_dict: Callable[..., None]) -> Callable[..., None]:
    """``OptimizerParamScheduler.load_state_dict``, with the same decision for the groups' rates."""

    @functools.wraps(load_state_dict)
    def loading(self: Any, state_dict: Mapping[str, Any]) -> None:
        loaded: LoadedRates | None = getattr(self.optimizer, "loaded_rates", None)
        if loaded is None:
            load_state_dict(self, state_dict)
            return
        if self.use_checkpoint_opt_param_scheduler and not self.override_opt_param_scheduler:
            _take_saved(self.optimizer.param_groups, loaded)
        elif not self.override_opt_param_scheduler:
            _require_equal(self.state_dict(), state_dict, loaded)
        load_state_dict(self, state_dict)
        # Megatron sets the groups' weight decay before it has loaded its own.
        self.step(0)

    return loading


def _take_saved(groups: Iterable[dict[str, Any]], loaded: LoadedRates) -> None:
    found = [(group, loaded.saved_for(group)) for group in groups]
    problems = sorted(
        {
            f"{_name(_kind(group))} with {_listed(_rates(group))} here, and none or several "
            "of its kind in the checkpoint"
            for group, rates in found
            if rates is None
        }
    )
    if problems := problems + loaded.lost():
        raise _mismatch(
            f"{TAKE_SAVED} does not say which rates to take: give the rates and rules of the saved "
            f"run (--lr, --matrix-lr, --decoupled-lr, --matrix-rule), or type {OVERRIDE}",
            problems,
        )
    for group, rates in found:
        assert rates is not None
        for key in RATES:
            group.pop(key, None)
        group.update(rates)


def _mismatch(sentence: str, problems: Iterable[str]) -> CheckpointMismatchError:
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return CheckpointMismatchError(f"megatron_muon: {sentence}{lines}")


def _require_equal(here: Mapping[str, Any], saved: Mapping[str, Any], loaded: LoadedRates) -> None:
    """Raise where the schedule or a group's rates are not those of the checkpoint."""
    problems = [
        f"{key} is {here[key]} here and {saved[key]} in the checkpoint"
        for key in here
        if key != "num_steps" and key in saved and here[key] != saved[key]
    ]
    problems = problems or loaded.problems()
    if problems:
        raise _mismatch(
            "the schedule of this run is not that of the checkpoint: type "
            f"{OVERRIDE} to go on with this run's, or {TAKE_SAVED} with the checkpoint's",
            problems,
        )
