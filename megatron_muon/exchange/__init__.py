"""Runs a plan over a process group. The only package that calls collectives."""

from megatron_muon.exchange.runner import Exchange, ExchangeCounters
from megatron_muon.exchange.transport import (
    GroupTransport,
    PlanMismatchError,
    Transport,
    check_agreement,
    gather_objects,
)

__all__ = [
    "Exchange",
    "ExchangeCounters",
    "GroupTransport",
    "PlanMismatchError",
    "Transport",
    "check_agreement",
    "gather_objects",
]
