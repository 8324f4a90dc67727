"""A checkpoint of any layout continues at any other: whole tensors bit-equal, same next step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from tests import tiny_gpt
from tests.distributed.checkpointing import assert_holds, load, poison, save, whole_state
from tests.distributed.training import Run, build, gather, scheduler
from tests.tiny_models import Layout
from tests.worst import worst_of

Ranks = Callable[..., list[Any]]

DENSE = (
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=2),
    Layout(pp=2, vpp=2),
    Layout(tp=2, pp=2),
    Layout(dp=2),
    Layout(dp=3),
    Layout(tp=2, dp=2),
    Layout(dp=4, instances=2),
)
EXPERTS = (
    Layout(dp=2),
    Layout(dp=2, ep=2),
    Layout(dp=4, ep=4),
    Layout(tp=2, dp=2, ep=2, etp=1),
    Layout(tp=2, etp=2),
    Layout(pp=2, dp=2, ep=2),
)
STEPS = 3
BAR = 1e-4
"""Of the next update, relative: the gradients of two layouts differ in the last bits already."""
GLOBAL_BATCH = 24
"""Every number of data-parallel ranks divides it, so that all see the same batches."""


def run_at(layout: Layout, **changes: Any) -> Run:
    sizes = {name: getattr(layout, name) for name in Layout.__dataclass_fields__}
    return Run(**sizes, overlap=True, sequence_parallel=True, steps=20, **changes)


def layers_of(layouts: tuple[Layout, ...]) -> int:
    """The minimum for the stages of all of them."""
    return max(2, *(layout.pp * (layout.vpp or 1) for layout in layouts))


def one_step(chunks: list[Any], optimizer: Any, schedule: Any, step: int, run: Run) -> Any:
    optimizer.zero_grad()
    micro_batches = tiny_gpt.batch(
        step, global_batch=GLOBAL_BATCH, micro_batch=GLOBAL_BATCH // run.dp // max(2, run.pp)
    )
    tiny_gpt.forward_backward(chunks, micro_batches, optimizer)
    lr = optimizer.param_groups[0]["lr"]
    succeeded, norm, _ = optimizer.step()
    assert succeeded
    schedule.step(1)
    return lr, float(norm), gather(chunks)


def train_and_save(rank: int, run: Run, folder: Path, kind: str) -> Any:
    """Some steps, a save, the whole state, and one step more."""
    chunks, optimizer, schedule = build(run)
    for step in range(STEPS):
        one_step(chunks, optimizer, schedule, step, run)
    save(chunks, optimizer, schedule, folder, kind)
    return whole_state(chunks, optimizer), one_step(chunks, optimizer, schedule, STEPS, run)


def saved_at(ranks: Ranks, run: Run, folder: Path, kind: str = "fully_reshardable") -> None:
    """Save a checkpoint, and beside it what it holds and what the next step gives."""
    results = ranks(run.world_size, train_and_save, run, folder, kind)
    whole = {key: tensor for state, _ in results for key, tensor in state.items()}
    lr, norm, _ = results[0][1]
    weights = {name: t for _, (_, _, held) in results for name, t in held.items()}
    torch.save((whole, lr, norm, weights), folder / "expected.pt")


def continues(rank: int, run: Run, folders: list[Path], kind: str) -> list[float]:
    """Load every checkpoint in turn and compare; the errors of the next step's updates."""
    chunks, optimizer, _ = build(run)
    errors = []
    for folder in folders:
        whole, lr, norm, weights = torch.load(folder / "expected.pt")
        poison(chunks, optimizer)
        # Megatron's adds the steps that it loads to those that it has made.
        schedule = scheduler(optimizer, run)
        load(chunks, optimizer, schedule, folder, kind)
        assert_holds(chunks, optimizer, whole)
        found_lr, found_norm, found = one_step(chunks, optimizer, schedule, STEPS, run)
        assert found_lr == lr
        assert abs(found_norm / norm - 1) < 1e-5
        worst = 0.0
        for name, tensor in found.items():
            if name.endswith("linear_qkv.bias"):
                # The gradient of k's bias is zero but for rounding, and Adam makes it a step.
                continue
            before = whole["fp32_param", name]
            update = weights[name] - before
            worst = worst_of(worst, (tensor - weights[name]).norm() / update.norm())
        errors.append(worst)
    return errors


def all_pairs(
    ranks: Ranks,
    folder: Path,
    layouts: tuple[Layout, ...],
    *,
    kind: str = "fully_reshardable",
    nearest: int | None = None,
    **changes: Any,
) -> None:
    """Save at every layout, continue every save at every layout.

    Args:
        ranks: Runs ranks.
        folder: Where checkpoints go.
        layouts: The layouts.
        kind: Sharding type of the optimizer's state.
        nearest: A layout continues so many saves before it only, around the end; None for all.
        **changes: Further settings of the runs.
    """
    changes["options"] = (("layers", layers_of(layouts)),)
    folders = []
    for number, layout in enumerate(layouts):
        folders.append(folder / str(number))
        saved_at(ranks, run_at(layout, **changes), folders[-1], kind)
    worst = 0.0
    for number, layout in enumerate(layouts):
        run = run_at(layout, **changes)
        chosen = (
            folders if nearest is None else [folders[number - n] for n in range(1, nearest + 1)]
        )
        for errors in ranks(run.world_size, continues, run, chosen, kind):
            worst = worst_of(worst, *errors)
    assert worst < BAR


DMUON = MatrixConfig(min_dim=1)
ORTH_DION = MatrixConfig(
    optimizer="orth_dion", min_dim=1, rank_fraction=0.5, scale_mode="shape_scaling"
)
both = pytest.mark.parametrize("config", [DMUON, ORTH_DION], ids=["dmuon", "orth_dion"])


# Orth-Dion has every kind of state that dmuon has, and right factors: all pairs are its.


def some_or_all(layouts: tuple[Layout, ...]) -> Any:
    """Every other layout continues the one before; or, slow, every layout continues every other."""
    every = pytest.param(layouts, None, id="every", marks=pytest.mark.slow)
    return pytest.mark.parametrize(
        ("layouts", "nearest"), [pytest.param(layouts[1::2], 1, id="some"), every]
    )


@some_or_all(DENSE)
def test_every_dense_layout_continues_others(
    ranks: Ranks, tmp_path: Path, layouts: tuple[Layout, ...], nearest: int | None
) -> None:
    all_pairs(ranks, tmp_path, layouts, config=ORTH_DION, nearest=nearest)


@some_or_all(EXPERTS)
def test_every_layout_of_experts_continues_others(
    ranks: Ranks, tmp_path: Path, layouts: tuple[Layout, ...], nearest: int | None
) -> None:
    all_pairs(ranks, tmp_path, layouts, config=ORTH_DION, nearest=nearest, model="moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layouts"), [("gpt", DENSE[::2]), ("moe", EXPERTS[1::2])], ids=["dense", "experts"]
)
def test_a_layout_of_dmuon_continues_the_one_before(
    ranks: Ranks, tmp_path: Path, model: str, layouts: tuple[Layout, ...]
) -> None:
    all_pairs(ranks, tmp_path, layouts, config=DMUON, nearest=1, model=model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("gpt-tied", (Layout(pp=2), Layout(tp=2, dp=2), Layout(pp=2, vpp=2, tp=2))),
        ("gpt-mha-bias", (Layout(dp=3), Layout(tp=2, dp=2))),
        ("gpt-mqa", (Layout(), Layout(tp=2), Layout(tp=2, dp=2))),
        ("gpt-gated-attention", (Layout(dp=2), Layout(tp=2, pp=2))),
        ("gpt-cp", (Layout(cp=2), Layout(tp=2, cp=2, dp=2), Layout(dp=3))),
        ("moe-shared", (Layout(dp=2, ep=2), Layout(tp=2, dp=2, ep=4, etp=1), Layout())),
        ("mla", (Layout(tp=2), Layout(dp=3), Layout(cp=2, tp=2))),
        # Its gradients depend on TP in megatron-core itself.
        ("mla-local", (Layout(tp=2, dp=2), Layout(tp=2), Layout(tp=2, pp=2))),
        ("mla-moe", (Layout(tp=2, dp=2, ep=2, etp=1), Layout(dp=2))),
        ("mtp", (Layout(dp=2), Layout(pp=2, tp=2))),
    ],
)
def test_every_model_continues_elsewhere(
    ranks: Ranks, tmp_path: Path, model: str, layouts: tuple[Layout, ...]
) -> None:
    all_pairs(ranks, tmp_path, layouts, config=DMUON, model=model)


@both
def test_a_run_continues_elsewhere(ranks: Ranks, tmp_path: Path, config: MatrixConfig) -> None:
    """The fast one of the above."""
    all_pairs(ranks, tmp_path, (Layout(tp=2, dp=2), Layout(pp=2)), config=config)
