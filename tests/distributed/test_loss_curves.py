"""Whole runs at different layouts follow the same loss curve, as closely as AdamW's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.training import Run, train
from tests.tiny_models import Layout
from tests.worst import worst_of

Ranks = Callable[..., list[Any]]

STEPS = 50
SHORT = 8
LAYOUTS = {
    "gpt": [Layout(tp=2, dp=2), Layout(dp=4), Layout(pp=2, vpp=2, dp=2)],
    "moe": [Layout(dp=4, ep=2), Layout(tp=2, dp=2, ep=2, etp=1), Layout(pp=2, dp=2, ep=2)],
    "mla": [Layout(tp=2, dp=2), Layout(dp=2), Layout(tp=2)],
}


def curve(ranks: Ranks, model: str, layout: Layout, optimizer: str, steps: int) -> list[float]:
    sizes = {name: getattr(layout, name) for name in Layout.__dataclass_fields__}
    run = Run(
        **sizes,
        model=model,
        optimizer=optimizer,
        overlap=True,
        sequence_parallel=True,
        steps=steps,
        lr=5e-3,
        keep="losses",
        options=(("layers", 4 if model == "gpt" else 2),),
    )
    losses: list[float] = ranks(run.world_size, train, run)[0]["losses"]
    return losses


@pytest.mark.parametrize(
    ("model", "steps"),
    [("moe", SHORT), *(pytest.param(model, STEPS, marks=pytest.mark.slow) for model in LAYOUTS)],
)
def test_loss_curves_agree_as_closely_as_adamws(ranks: Ranks, model: str, steps: int) -> None:
    apart = {}
    for optimizer in ("adam", "dmuon"):
        base = curve(ranks, model, Layout(), optimizer, steps)
        assert base[-1] < base[0]
        others = [curve(ranks, model, layout, optimizer, steps) for layout in LAYOUTS[model]]
        apart[optimizer] = worst_of(
            *(
                abs(found - expected)
                for other in others
                for found, expected in zip(other, base, strict=True)
            )
        )
    assert apart["dmuon"] <= 3.0 * apart["adam"]
