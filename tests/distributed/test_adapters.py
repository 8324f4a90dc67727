"""Low-rank adapters on real megatron-core layers, named and cut as Megatron-Bridge does."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.matrices import Rule
from tests import tiny_gpt
from tests.distributed.training import Run, make_optimizer
from tests.ranks import layout

Ranks = Callable[..., list[Any]]


class Adapter(torch.nn.Module):
    """A and B of a column-parallel layer: TP cuts both by rows, A's rows being the rank."""

    def __init__(self, base: Any, rank: int) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear

        super().__init__()

        def linear(rows: int, cols: int, *, gather: bool) -> Any:
            return ColumnParallelLinear(
                cols,
                rows,
                config=base.config,
                init_method=partial(torch.nn.init.normal_, std=0.02),
                bias=False,
                gather_output=gather,
            )

        self.linear_in = linear(rank, base.input_size, gather=True)
        self.linear_out = linear(base.output_size, rank, gather=False)


class Adapted(torch.nn.Module):
    """A layer and its adapter, whose output is added."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        self.to_wrap, self.adapter = base, Adapter(base, rank)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
        output, bias = self.to_wrap(tokens)
        narrow, _ = self.adapter.linear_in(tokens)
        return output + self.adapter.linear_out(narrow)[0], bias


def _adapted(rank: int) -> Any:
    """A tiny GPT, frozen, with an adapter on each qkv."""
    torch.manual_seed(5)
    model = tiny_gpt.build_gpt()
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        layer.self_attention.linear_qkv = Adapted(layer.self_attention.linear_qkv, rank)
    return model


def _train(_: int, optimizer: str, adapter_rank: int, rules: tuple[Rule, ...]) -> Any:
    layout(tp=2)
    wrapped = tiny_gpt.wrap_ddp(_adapted(adapter_rank))
    run = Run(tp=2, dp=2, optimizer=optimizer, config=MatrixConfig(rules=rules))
    with redirect_stdout(io.StringIO()) as printed:
        built = make_optimizer(run, [wrapped])
    for step in range(3):
        tiny_gpt.train_step(wrapped, built, step, global_batch=16)
    matrices = [
        m.name
        for c in built.chained_optimizers
        if (p := getattr(c, "plan", None))
        for m in p.matrices
    ]
    return printed.getvalue(), matrices, tiny_gpt.gather_full(wrapped)


@pytest.mark.parametrize("adapter_rank", [8, 32, 64])
def test_adapters_are_trained_as_by_adam_whatever_their_rank(
    ranks: Ranks, adapter_rank: int
) -> None:
    """The hidden size is 32, so at rank 32 and 64 no side is short."""
    printed, matrices, ours = ranks(4, _train, "dmuon", adapter_rank, ())[0]
    _, _, theirs = ranks(4, _train, "adam", adapter_rank, ())[0]
    assert not matrices
    assert "low-rank adapter" in printed
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_a_rule_makes_adapters_matrices(ranks: Ranks) -> None:
    rules = (Rule(pattern="*.adapter.linear_out.weight", optimizer="matrix"),)
    _, matrices, _ = ranks(4, _train, "dmuon", 32, rules)[0]
    prefix = "decoder.layers"
    assert matrices == [
        f"{prefix}.{n}.self_attention.linear_qkv.adapter.linear_out.weight" for n in (0, 1)
    ]
