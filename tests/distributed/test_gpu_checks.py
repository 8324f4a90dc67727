"""The checks of tools/gpu_checks, on CPU: they pass where all is right, and say what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.te import loading

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")


def _kernel(rank: int, name: str) -> Any:
    loading.use(loading.VERSIONS[-1])
    from tools.gpu_checks import kernels

    return getattr(kernels, name)(CPU)


@pytest.mark.parametrize("name", ["newton_schulz_rates", "right_factors", "shim_codes"])
def test_kernels_are_checked(te_ranks: Ranks, name: str) -> None:
    (figures,) = te_ranks(1, _kernel, name, init_process_group=False)
    assert figures and all(isinstance(value, str) for value in figures.values())


@pytest.mark.parametrize("name", ["symmetric_products", "empty_group_of_adam"])
def test_what_needs_a_gpu_says_so(te_ranks: Ranks, name: str) -> None:
    def body(rank: int) -> str:
        from tools.gpu_checks.outcome import NotPossible

        with pytest.raises(NotPossible) as told:
            _kernel(rank, name)
        return str(told.value)

    assert "needs" in te_ranks(1, body, init_process_group=False)[0]


def test_another_code_is_a_difference(te_ranks: Ranks) -> None:
    def body(rank: int) -> str:
        from tests.te import extension
        from tools.gpu_checks.outcome import Differs

        loading.use(loading.VERSIONS[-1])
        right = extension._QUANTIZE["Float8BlockQuantizer"]

        def wrong(values: Any, quantizer: Any, out: Any) -> None:
            right(values, quantizer, out)
            if type(out).__name__ == "SimpleNamespace":
                out._rowwise_data[3, 5] += 1

        extension._QUANTIZE["Float8BlockQuantizer"] = wrong
        with pytest.raises(Differs) as told:
            _kernel(rank, "shim_codes")
        return str(told.value)

    assert "blockwise: 1 of" in te_ranks(1, body, init_process_group=False)[0]


def _fp8(
    rank: int, recipe: str, overlap: bool = False, model: str = "fp8", *, spoil: bool = False
) -> Any:
    from tools.gpu_checks.training import fp8_weights

    if spoil:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        DistributedOptimizer._copy_main_params_to_param_buffer = lambda self: None
    return fp8_weights(CPU, recipe=recipe, model=model, steps=2, overlap=overlap)


@pytest.mark.parametrize(
    ("recipe", "overlap"),
    [("delayed", False), ("tensorwise", False), ("blockwise", False), ("mxfp8", True)],
)
def test_fp8_weights_are_checked(te_ranks: Ranks, recipe: str, overlap: bool) -> None:
    for figures in te_ranks(2, _fp8, recipe, overlap):
        assert figures["layout"] == "TP1 DP2" and figures["quantized"] == 8


def test_experts_and_saves_are_checked(te_ranks: Ranks) -> None:
    def saves(rank: int) -> Any:
        from tools.gpu_checks.training import saves

        return saves(CPU)

    for figures in te_ranks(2, _fp8, "blockwise", False, "fp8-moe"):
        assert figures["quantized"] == 2 * (2 + 4 * 2)
    assert all(figures["tensors"] > 8 for figures in te_ranks(2, saves))


@pytest.mark.parametrize("model", ["mla", "output"])
def test_layers_of_transformer_engine_need_a_gpu(te_ranks: Ranks, model: str) -> None:
    def body(rank: int) -> str:
        from tools.gpu_checks.outcome import NotPossible

        with pytest.raises(NotPossible) as told:
            _fp8(rank, "blockwise", False, model)
        return str(told.value)

    assert te_ranks(1, body) == ["needs layers of Transformer Engine"]


def test_weights_that_stay_are_a_difference(te_ranks: Ranks) -> None:
    from tests.ranks import RankFailed

    with pytest.raises(RankFailed) as found:
        te_ranks(2, _fp8, "mxfp8", spoil=True)
    assert "Differs: step 0: not of the masters" in str(found.value)


def test_step_times_and_split_matrices_are_measured(te_ranks: Ranks) -> None:
    def times(rank: int) -> Any:
        from tools.gpu_checks.training import step_times

        return step_times(CPU)

    def split(rank: int) -> Any:
        from tools.gpu_checks.training import split_matrices

        return split_matrices(CPU)

    (figures,) = te_ranks(1, times)
    assert {"AdamW", "dmuon"} <= set(figures)
    assert all(figures["split"] > 0 for figures in te_ranks(2, split))
