"""Runs a plan over a process group. The only package that calls collectives."""

from megatron_muon.exchange.factor_runner import FactorExchange, WaveMail
from megatron_muon.exchange.groups import exchange_group, neighbours_on_a_node
from megatron_muon.exchange.messenger import ExchangeCounters, Flight
from megatron_muon.exchange.pieces import piece_of
from megatron_muon.exchange.runner import Exchange
from megatron_muon.exchange.transport import (
    GroupTransport,
    PlanMismatchError,
    Transport,
    check_agreement,
    gather_objects,
    same_on_all_ranks,
)

__all__ = [
    "Exchange",
    "ExchangeCounters",
    "FactorExchange",
    "Flight",
    "GroupTransport",
    "PlanMismatchError",
    "Transport",
    "WaveMail",
    "check_agreement",
    "exchange_group",
    "gather_objects",
    "neighbours_on_a_node",
    "piece_of",
    "same_on_all_ranks",
]
