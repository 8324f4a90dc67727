"""What quantized weights cannot be trained with, refused when the optimizer is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.fp8 import fp8_run, weights_of
from tests.distributed.training import build, make_optimizer

Ranks = Callable[..., list[Any]]


def _refused(rank: int, spoil: str, tp: int) -> str:
    run = fp8_run("blockwise" if spoil != "overlap" else "mxfp8", tp=tp, dp=2 // tp)
    chunks, _, _ = build(run)
    _, _, weight = next(weights_of(chunks))
    if spoil == "not gathered":
        chunks[0].ddp_config.fp8_param_gather = False
    elif spoil == "overlap":
        chunks[0].ddp_config.overlap_param_gather = True
    elif spoil == "attributes":
        del weight.tensor_model_parallel
    elif spoil == "version":
        from megatron.core import utils
        from packaging.version import Version

        utils.get_te_version = lambda: Version("2.21.0")
    else:
        type(weight).__name__ = spoil
    with pytest.raises(ValueError) as refused:
        make_optimizer(run, chunks)
    return str(refused.value)


@pytest.mark.parametrize(
    ("spoil", "tp", "sentences"),
    [
        ("not gathered", 1, ["fp8_param_gather is False", "set it to True"]),
        ("overlap", 1, ["OptimizerConfig.overlap_param_gather is False", "give both the same"]),
        ("attributes", 2, ["has lost its tensor-parallel attributes", "use layers of"]),
        ("version", 1, ["2.21.0 is installed", "Transformer Engine 2.19 or 2.20"]),
        ("NVFP4Tensor", 1, ["is a NVFP4Tensor of torch.bfloat16", "remove --fp4-param-gather"]),
        ("GroupedTensor", 1, ["is a GroupedTensor", "remove --moe-single-grouped-weight"]),
        ("HybridQuantizedTensor", 1, ["choose one recipe for both directions"]),
        ("NextYearsTensor", 1, ["is a NextYearsTensor", "use another --fp8-recipe"]),
    ],
)
def test_it_is_refused_with_what_to_do(
    te_ranks: Ranks, spoil: str, tp: int, sentences: list[str]
) -> None:
    for message in te_ranks(2, _refused, spoil, tp):
        assert message.startswith("megatron_muon: 1 configuration problem\n")
        for sentence in sentences:
            assert sentence in message


def test_lost_attributes_do_not_matter_without_tensor_parallelism(te_ranks: Ranks) -> None:
    def body(rank: int) -> list[int]:
        from megatron_muon.integration.quantized import quantized_weight_problems

        chunks, optimizer, _ = build(fp8_run("blockwise", dp=2))
        del next(weights_of(chunks))[2].tensor_model_parallel
        return [
            len(list(quantized_weight_problems(optimizer.config, chunks, tp=tp))) for tp in (1, 2)
        ]

    assert te_ranks(2, body) == [[0, 1]] * 2


def test_moving_a_module_loses_what_is_refused(te_ranks: Ranks) -> None:
    """The cause, with the real classes: torch swaps the tensor, and its attributes with it."""

    def body(rank: int) -> bool:
        chunks, _, _ = build(fp8_run("blockwise"))
        _, _, weight = next(weights_of(chunks))
        before = hasattr(weight, "tensor_model_parallel")
        chunks[0].module._apply(lambda tensor: tensor.clone())
        _, _, weight = next(weights_of(chunks))
        return before and not hasattr(weight, "tensor_model_parallel")

    assert te_ranks(1, body) == [True]


def test_mxfp8_weights_need_the_gradient_buffer(te_ranks: Ranks) -> None:
    """Transformer Engine's own error, before an optimizer could say more; the flag is refused."""

    def body(rank: int) -> str:
        from tests import tiny_gpt
        from tests.ranks import layout
        from tests.te import loading
        from tests.te.weights import quantize_weights

        layout()
        loading.use(loading.VERSIONS[-1])
        model = tiny_gpt.build_gpt(hidden=64, ffn=64, params_dtype=torch.bfloat16)
        with pytest.raises(NotImplementedError) as refused:
            tiny_gpt.wrap_ddp(
                model, prepare=lambda m: quantize_weights(m, "mxfp8"), fp8_param_gather=True
            )
        return str(refused.value)

    assert "MXFP8Tensor" in te_ranks(1, body)[0]


FLAGS = """
    --optimizer dmuon --use-distributed-optimizer --num-layers 2 --hidden-size 128
    --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1
    --train-iters 1 --lr 1e-3 --min-lr 1e-4 --bf16 --tokenizer-type NullTokenizer --vocab-size 63
    --mock-data --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
    --fp8-param-gather --overlap-grad-reduce --overlap-param-gather
"""


def _validated(rank: int, words: str) -> tuple[Any, ...]:
    """The command line as far as it goes without layers of Transformer Engine."""
    import os
    import sys

    from megatron.core import utils
    from packaging.version import Version

    import megatron_muon

    theirs = utils.get_te_version
    for module in list(sys.modules.values()):
        if getattr(module, "get_te_version", None) is theirs:
            module.get_te_version = lambda: Version("2.20.2")
    megatron_muon.install()
    from megatron.training import arguments, training

    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "WORLD_SIZE": "2"}
    sys.argv = ["pretrain_gpt.py", *FLAGS.split(), *words.split()]
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    config, _ = training.get_megatron_optimizer_config(args)
    return (
        args.matrix_optimizer,
        args.use_distributed_optimizer,
        args.fp8_param_gather,
        config.fp8_recipe,
        config.reuse_grad_buf_for_mxfp8_param_ag,
        config.overlap_param_gather,
    )


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("delayed", "--fp8-format hybrid"),
        ("tensorwise", "--fp8-format e4m3 --first-last-layers-bf16"),
        ("blockwise", "--fp8-format e4m3 --first-last-layers-bf16"),
        ("mxfp8", "--fp8-format e4m3 --reuse-grad-buf-for-mxfp8-param-ag"),
    ],
)
def test_the_flags_pass_megatrons_own_checks(te_ranks: Ranks, recipe: str, words: str) -> None:
    """They reach Megatron's configurations as with adam."""
    found = te_ranks(1, _validated, f"{words} --fp8-recipe {recipe}", init_process_group=False)
    assert found == [("dmuon", True, True, recipe, recipe == "mxfp8", True)]
