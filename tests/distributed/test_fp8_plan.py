"""``python -m megatron_muon.plan`` of FP8 runs, on a machine without Transformer Engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_plan_command import _MODEL, ROOT

Ranks = Callable[..., list[Any]]

ON_TWO_STAGES = 2
LINEAR = 1_310_720 // ON_TWO_STAGES
"""Elements of linear weights on a rank: four layers, TP 2, PP 2."""
OTHERS = 256 * 512 // 2 + 256 * 2 * 2
"""Of embedding or output layer and norms, give or take the last norm and padding."""

MOE = (
    "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
)
FP8 = "--fp8-param-gather --fp8-format"
RUNS = {
    "bf16": "--bf16",
    "16-bit momentum": "--bf16 --matrix-momentum-dtype bf16",
    "products": "--fp8-format hybrid",
    "delayed": f"{FP8} hybrid --fp8-recipe delayed",
    "tensorwise": f"{FP8} e4m3 --fp8-recipe tensorwise --first-last-layers-bf16",
    "tensorwise b200": f"{FP8} e4m3 --fp8-recipe tensorwise",
    "blockwise": f"{FP8} e4m3 --fp8-recipe blockwise --grad-reduce-in-bf16",
    "mxfp8": f"{FP8} e4m3 --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag",
    "experts": f"{FP8} e4m3 --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag {MOE}",
    "odd sizes": f"{FP8} e4m3 --fp8-recipe tensorwise --ffn-hidden-size 520",
    "without buffer": f"{FP8} e4m3 --fp8-recipe mxfp8",
    "refused": f"{FP8} e4m3 --fp8-recipe custom --fp8-quantizer-factory a.b --fp4-param-gather "
    "--use-precision-aware-optimizer --optimizer-cpu-offload --moe-single-grouped-weight",
}
_ALL = """
import contextlib, io, json, sys
from megatron_muon.dry_run.command import main
found = {}
for name, words in json.load(sys.stdin).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    found[name] = (code, out.getvalue(), err.getvalue())
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str, Any]]:
    """(exit code, text, errors, report) of every run; Megatron is imported once for all."""
    folder = tmp_path_factory.mktemp("plans")
    words = {
        name: [
            *("--world-size", "16", "--gpu", "b200" if "b200" in name else "h100"),
            *("--json", str(folder / f"{name}.json"), "examples/pretrain_gpt_small.py"),
            *(*_MODEL.split(), "--optimizer", "dmuon", *flags.split()),
        ]
        for name, flags in RUNS.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", _ALL],
        input=json.dumps(words),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    return {
        name: (*told, _read(folder / f"{name}.json"))
        for name, told in json.loads(done.stdout).items()
    }


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _both(report: Any, *keys: str) -> list[float]:
    """A number of both stages, over all groups of each."""
    found = []
    for stage in report["stages"]:
        values: list[Any] = stage["groups"]
        for key in keys:
            values = [value[key] for value in values]
        found.append(float(sum(values)))
    return found


@pytest.mark.parametrize(
    ("run", "weights", "gathered"),
    [
        ("bf16", 2 * LINEAR, 2 * LINEAR),
        ("products", 2 * LINEAR, 2 * LINEAR),
        ("delayed", 2 * LINEAR, LINEAR),
        # One of the two layers of either stage has bf16 weights.
        ("tensorwise", 2 * LINEAR, LINEAR // 2 + LINEAR),
        ("tensorwise b200", LINEAR, LINEAR),
        ("blockwise", 2 * LINEAR, LINEAR),
        ("mxfp8", 2.0625 * LINEAR, 2 * LINEAR),
    ],
)
def test_bytes_of_weights_and_of_the_gather_are_those_of_the_recipe(
    planned: Any, run: str, weights: float, gathered: float
) -> None:
    """Per tensor and by blocks codes are gathered, of MXFP8 weights bf16 values."""
    code, _, error, report = planned[run]
    assert code == 0, error
    assert _both(report, "memory", "weights") == pytest.approx([weights + 2 * OTHERS] * 2, rel=5e-3)
    assert _both(report, "gathered_bytes") == pytest.approx([gathered + 2 * OTHERS] * 2, rel=5e-3)
    reduced = 2 if run == "blockwise" else 4
    expected = pytest.approx([reduced * (LINEAR + OTHERS)] * 2, rel=5e-3)
    assert _both(report, "memory", "gradients") == expected


def test_the_report_says_what_stands_for_what(planned: Any) -> None:
    assert planned["bf16"][3]["stand_ins"] == []
    installed, said = planned["products"][3]["stand_ins"]
    assert installed == "Transformer Engine is not installed, 2.20.2 is assumed"
    assert said == "FP8 products (--fp8-recipe delayed) are not counted, and weights are bfloat16"
    _, text, _, report = planned["mxfp8"]
    installed, said, needs = report["stand_ins"]
    assert said.startswith("weights of linear layers under --fp8-param-gather are fake mxfp8")
    assert needs.startswith("--fp8-recipe mxfp8 needs GPUs of compute capability 10.0, and --gpu")
    assert all(f"\n{line}\n" in text for line in report["stand_ins"])
    assert "bfloat16 for mxfp8" in report["table_at_start"]
    assert len(planned["tensorwise b200"][3]["stand_ins"]) == 2


def test_the_step_is_that_of_bf16_weights(planned: Any) -> None:
    """Matrices, owners and what is exchanged do not depend on how weights are kept."""
    for run in ("delayed", "mxfp8"):
        stages = (planned[name][3]["stages"] for name in (run, "bf16"))
        for mine, theirs in zip(*stages, strict=True):
            for key in ("matrices", "flops_of_ranks", "balance_bound"):
                assert mine["groups"][0][key] == theirs["groups"][0][key]
            assert mine["groups"][0]["counted_against_plan"]["sent_bytes"] == 0


def test_momenta_of_16_bits_take_half_the_memory(planned: Any) -> None:
    """And the copies in which they are summed are within the memory of a step."""
    narrow, wide = planned["16-bit momentum"][3], planned["bf16"][3]
    for mine, theirs in zip(narrow["stages"], wide["stages"], strict=True):
        (group,), (other,) = mine["groups"], theirs["groups"]
        assert 2 * group["memory"]["momentum"] == other["memory"]["momentum"] > 0
        assert abs(group["counted_against_plan"]["memory_percent"]) < 10
    assert "(bfloat16)" in narrow["table_at_start"]


def test_experts_are_planned_in_fp8(planned: Any) -> None:
    code, _, error, report = planned["experts"]
    assert code == 0, error
    _, expert = report["stages"][0]["groups"]
    elements = expert["elements"] // 2
    assert expert["gathered_bytes"] == pytest.approx(2 * elements, rel=1e-2)
    assert expert["memory"]["weights"] == pytest.approx(2.0625 * elements, rel=1e-2)
    # The router is no layer of Transformer Engine.
    assert "bfloat16 and " in report["table_at_start"]


def test_refusals_are_those_of_a_real_run(planned: Any) -> None:
    code, text, error, _ = planned["without buffer"]
    assert (code, text) == (2, "")
    assert "--reuse-grad-buf-for-mxfp8-param-ag is needed by --fp8-param-gather" in error
    assert error.count("\n  - ") == 1
    code, _, error, _ = planned["odd sizes"]
    assert code == 2
    assert "a linear weight is 256x260 on a rank, and --fp8-recipe tensorwise needs" in error
    code, _, error, _ = planned["refused"]
    assert code == 2
    for flag in (
        *("--use-precision-aware-optimizer", "--optimizer-cpu-offload", "--fp4-param-gather"),
        *("--fp8-recipe custom", "--moe-single-grouped-weight"),
    ):
        assert f"\n  - {flag} " in error
    assert error.count("\n  - ") == 5


SHAPES = ((64, 64), (96, 160), (128, 384), (1024, 96), (32, 4096))


def test_bytes_of_a_weight_are_those_that_transformer_engine_allocates(te_ranks: Ranks) -> None:
    """Codes, scales with their padding, and the transposed copy; with its own Python."""

    def body(rank: int) -> list[tuple[Any, ...]]:
        import torch

        from megatron_muon.dry_run.quantized import weight_bytes
        from tests.te import loading
        from tests.te.weights import RECIPES, quantizer

        loading.use(loading.VERSIONS[-1])
        from transformer_engine.pytorch.tensor.utils import post_all_gather_processing

        found = []
        for recipe in RECIPES:
            for shape in SHAPES:
                weight = quantizer(recipe)(torch.ones(shape, dtype=torch.bfloat16))
                post_all_gather_processing([weight])
                tensors = (getattr(weight, name, None) for name, _ in type(weight)._INNER_TENSORS)
                held = sum(t.numel() * t.element_size() for t in tensors if t is not None)
                found.append((recipe, shape, held, weight_bytes(recipe, shape, (9, 0))))
        return found

    (found,) = te_ranks(1, body, init_process_group=False)
    assert [entry for entry in found if entry[2] != entry[3]] == []
    assert len(found) == 4 * len(SHAPES)
