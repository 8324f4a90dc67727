"""What Megatron and we call of Transformer Engine in one step, per version: a golden transcript.

A new version that calls something else is seen here before it is supported. To renew the file
after looking at the difference: ``.venv/bin/python -m pytest tests/distributed/test_te_calls.py``
with ``MEGATRON_MUON_RENEW=1``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.fp8 import finish_gather, fp8_run, gradient_step
from tests.distributed.training import build
from tests.te import extension, loading
from tests.te.weights import RECIPES

Ranks = Callable[..., list[Any]]
GOLDEN = Path(__file__).with_name("te_calls.json")


def _calls(rank: int, version: str, recipe: str, overlap: bool) -> list[str]:
    run = fp8_run(recipe, te=version, dp=2, overlap=overlap, options=(("layers", 1),))
    chunks, optimizer, _ = build(run)
    gradient_step(chunks, optimizer, run, 0)
    extension.calls.clear()
    assert optimizer.step()[0]
    finish_gather(chunks, optimizer)
    runs = ((name, len(list(same))) for name, same in groupby(extension.calls))
    return [name if count == 1 else f"{name} x {count}" for name, count in runs]


@pytest.mark.parametrize("version", loading.VERSIONS)
def test_calls_are_those_of_the_transcript(te_ranks: Ranks, version: str) -> None:
    found = {
        f"{recipe} {'overlap' if overlap else 'plain'} rank {rank}": calls
        for recipe in RECIPES
        for overlap in (False, True)
        for rank, calls in enumerate(te_ranks(2, _calls, version, recipe, overlap))
    }
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("MEGATRON_MUON_RENEW"):
        GOLDEN.write_text(json.dumps(golden | {version: found}, indent=1) + "\n")
        return
    assert found == golden[version]
