"""Runs a plan over a process group. The only package that calls collectives."""

from megatron_muon.exchange.groups import exchange_group
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
    "exchange_group",
    "gather_objects",
]
