"""FP8 weights through Megatron's own ``pretrain``, by its flags: layers, loop, checkpoints."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.fp8 import masters, unequal_replicas, weights_of, wrong_codes
from tests.distributed.pretraining import pretrain_with_our_hooks
from tests.distributed.test_pretrain import DMUON, ORTH_DION
from tests.te import layers

Ranks = Callable[..., list[Any]]

SIZES = ("--hidden-size", "64", "--ffn-hidden-size", "64", "--bf16")
FLAGS: dict[str, tuple[str, ...]] = {
    "delayed": ("--fp8-format", "hybrid"),
    "tensorwise": ("--fp8-format", "e4m3", "--first-last-layers-bf16"),
    "blockwise": ("--fp8-format", "e4m3"),
    "mxfp8": ("--fp8-format", "e4m3", "--reuse-grad-buf-for-mxfp8-param-ag"),
}
# By which kind Megatron was asked for, and how many of the eight linear weights it made.
MADE = {
    "delayed": (["Float8Tensor"], 8),
    # First and last layer are all that there are, but for the flags that keep one of them.
    "tensorwise": (["Float8Tensor"], 4),
    "blockwise": (["Float8BlockwiseQTensor"], 8),
    "mxfp8": (["MXFP8Tensor"], 8),
}


def fp8_flags(
    recipe: str | None, *more: str, optimizer: tuple[str, ...] = DMUON
) -> tuple[str, ...]:
    """Flags of a small run; None for bf16 weights."""
    if recipe is None:
        return (*optimizer, *SIZES, *more)
    start = ("--num-layers-at-start-in-bf16", "0") if recipe == "tensorwise" else ()
    chosen = ("--fp8-param-gather", "--fp8-recipe", recipe, *FLAGS[recipe], *start)
    return (*optimizer, *SIZES, *chosen, *more)


def fp8_pretrain(rank: int, *args: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses, and what the weights were at the end, which must be the quantized masters."""
    layers.install()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        losses, optimizer = pretrain_with_our_hooks(rank, *args)
    chunks = list(optimizer.model_chunks)
    held = masters(chunks, optimizer)
    # After a load Megatron's Adam has the weights of the model part until its first step.
    if type(optimizer).__name__ == "MatrixChainedOptimizer":
        assert not (wrong := wrong_codes(chunks, held)), wrong
    assert not (unequal := unequal_replicas(chunks)), unequal
    found = [weight for _, _, weight in weights_of(chunks)]
    return losses, {
        "made": (sorted({type(weight).__name__ for weight in found}), len(found)),
        "masters": held,
        "said": said.getvalue(),
    }


def _run(ranks: Ranks, load: Path, save: Path, tp: int, steps: int, flags: Any, dp: int = 2) -> Any:
    arguments = (load, save, tp, 1, steps, flags)
    return ranks(tp * dp, fp8_pretrain, *arguments, init_process_group=False)


@pytest.mark.parametrize(
    ("recipe", "tp", "optimizer"),
    [
        ("delayed", 2, DMUON),
        ("tensorwise", 1, DMUON),
        ("blockwise", 1, ORTH_DION),
        ("mxfp8", 2, DMUON),
        pytest.param("tensorwise", 2, ORTH_DION, marks=pytest.mark.slow),
        pytest.param("delayed", 1, ORTH_DION, marks=pytest.mark.slow),
        pytest.param("mxfp8", 1, ORTH_DION, marks=pytest.mark.slow),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else None,
)
def test_resume_is_bit_equal(
    ranks: Ranks, tmp_path: Path, recipe: str, tp: int, optimizer: tuple[str, ...]
) -> None:
    flags = fp8_flags(recipe, optimizer=optimizer)
    straight, stopped, resumed = (tmp_path / n for n in ("straight", "stopped", "resumed"))
    whole = _run(ranks, straight, straight, tp, 4, flags)
    first = _run(ranks, stopped, stopped, tp, 2, flags)
    second = _run(ranks, stopped, resumed, tp, 4, flags)
    for (expected, facts), (before, _), (after, later) in zip(whole, first, second, strict=True):
        assert before + after == expected
        assert facts["made"] == later["made"] == MADE[recipe]
        for name, value in facts["masters"].items():
            assert torch.equal(value, later["masters"][name]), name


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("delayed", "mxfp8"),
        ("mxfp8", None),
        (None, "blockwise"),
        pytest.param("blockwise", "delayed", marks=pytest.mark.slow),
        pytest.param(None, "delayed", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_in_another_recipe(
    ranks: Ranks, tmp_path: Path, first: str | None, then: str | None
) -> None:
    """Masters are those that were saved, and the weights their quantization in the new recipe."""
    saved = _run(ranks, tmp_path, tmp_path, 1, 2, fp8_flags(first))
    loaded = _run(ranks, tmp_path, tmp_path / "again", 1, 2, fp8_flags(then))
    for (_, facts), (losses, found) in zip(saved, loaded, strict=True):
        assert losses == []
        assert found["made"] == (([], 0) if then is None else MADE[then])
        for name, value in facts["masters"].items():
            assert torch.equal(value, found["masters"][name]), name
    trained = _run(ranks, tmp_path, tmp_path / "more", 1, 3, fp8_flags(then))
    assert all(len(losses) == 2 for losses, _ in trained)


def test_masters_without_state_are_the_weights_that_the_checkpoint_holds_if_asked_for(
    ranks: Ranks, tmp_path: Path
) -> None:
    """``--no-load-optim`` makes them of codes; so does Megatron's flag alone, by streaming."""
    ((_, saved),) = _run(ranks, tmp_path, tmp_path, 1, 2, fp8_flags(None), dp=1)
    exact = {name: value.bfloat16().float() for name, value in saved["masters"].items()}
    advice = ("--load-main-params-from-ckpt", "--no-stream-ckpt-dequant")
    for more in ((), advice[:1], advice):
        flags = fp8_flags("blockwise", "--no-load-optim", *more)
        ((_, told),) = _run(ranks, tmp_path, tmp_path / "again", 1, 2, flags, dp=1)
        assert (f"add {' '.join(advice)}" in told["said"]) is (more != advice)
        others = [n for n, value in told["masters"].items() if not torch.equal(value, exact[n])]
        assert (others == []) is (more == advice), (more, others)
