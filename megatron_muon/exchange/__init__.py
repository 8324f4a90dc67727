"""Runs a plan over a process group. The only package that calls collectives."""

from megatron_muon.exchange.groups import exchange_group, neighbours_on_a_node
from megatron_muon.exchange.mailbox import ExchangeCounters, Flight, Mailbox, copy_all, piece_of
from megatron_muon.exchange.panels import pass_requests, serve, take_panel
from megatron_muon.exchange.runner import Exchange, WaveFunction
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
    "Flight",
    "GroupTransport",
    "Mailbox",
    "PlanMismatchError",
    "Transport",
    "WaveFunction",
    "check_agreement",
    "copy_all",
    "exchange_group",
    "gather_objects",
    "neighbours_on_a_node",
    "pass_requests",
    "piece_of",
    "same_on_all_ranks",
    "serve",
    "take_panel",
]
