"""Low-rank adapters on real megatron-core layers, named and sharded as in Megatron-Bridge."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.matrices import Rule
from tests import tiny_gpt
from tests.distributed.offline import ADAM, STEPS, convert, different, train
from tests.distributed.test_pretrain import DMUON, pretrain_with_hooks
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

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = dict(self.to_wrap.sharded_state_dict(prefix, *args, **kwargs))
        for name, factor in self.adapter.named_children():
            found |= factor.sharded_state_dict(f"{prefix}adapter.{name}.", *args, **kwargs)
        return found


def _adapt(model: Any, rank: int) -> None:
    """Put an adapter on each qkv."""
    for layer in model.decoder.layers:
        layer.self_attention.linear_qkv = Adapted(layer.self_attention.linear_qkv, rank)


def _adapted(rank: int) -> Any:
    """A tiny GPT, frozen, with adapters."""
    torch.manual_seed(5)
    model = tiny_gpt.build_gpt()
    model.requires_grad_(False)
    _adapt(model, rank)
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


def _pretrain(rank: int, *args: Any) -> Any:
    """A run whose model has adapters; all is trained."""
    from megatron.core.models.gpt import GPTModel

    build = GPTModel.__init__

    def with_adapters(model: Any, *positional: Any, **named: Any) -> None:
        build(model, *positional, **named)
        _adapt(model, 32)

    GPTModel.__init__ = with_adapters
    return pretrain_with_hooks(rank, *args)


def test_convert_sends_them_where_training_does(ranks: Ranks, tmp_path: Path) -> None:
    """Both factors have rank 32, as many as the hidden size."""
    train(ranks, tmp_path / "adam", tmp_path / "adam", ADAM, steps=STEPS, run=_pretrain)
    there = convert(tmp_path / "adam", tmp_path / "c", "dmuon")
    for factor in ("linear_in", "linear_out"):
        name = f"decoder.layers.self_attention.linear_qkv.adapter.{factor}.weight"
        assert there.tensors[f"optimizer.state.exp_avg_sq.{name}"].shape[0] == 2
    train(ranks, tmp_path / "c", tmp_path / "loaded", DMUON, pp=2, steps=STEPS, run=_pretrain)
    assert different(there, tmp_path / "loaded", "") == []
    train(ranks, tmp_path / "c", tmp_path / "on", DMUON, pp=2, run=_pretrain)
    assert len(different(there, tmp_path / "on", "fp32_param of decoder", 1e-4)) > 8
