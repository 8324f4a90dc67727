"""Low-rank adapters are detected by name and structure, at every rank, and nothing else."""

from __future__ import annotations

import pytest

from megatron_muon.matrices import adapter_parameters, unwrapped

H, OUT, FFN = 64, 96, 128
QKV = "decoder.layers.0.self_attention.linear_qkv"
MLP = "decoder.layers.0.mlp"
BASE = {
    f"{QKV}.weight": (OUT, H),
    f"{MLP}.linear_fc1.weight": (2 * FFN, H),
    f"{MLP}.linear_fc2.weight": (H, FFN),
    f"{MLP}.router.weight": (8, H),
    "decoder.final_layernorm.weight": (H,),
}
RANKS = pytest.mark.parametrize("rank", [1, 8, 32, H, 2 * FFN])


def _pair(stem: str, rank: int, out: int, *names: str) -> dict[str, tuple[int, ...]]:
    down, up = names or ("linear_in.weight", "linear_out.weight")
    return {f"{stem}.{down}": (rank, H), f"{stem}.{up}": (out, rank)}


@RANKS
@pytest.mark.parametrize(
    ("stem", "out", "names"),
    [
        (f"{QKV}.adapter", OUT, ()),
        (f"{QKV}.adapter.adapter_q", 48, ()),
        (f"{QKV}.adapters.1", OUT, ()),
        (f"{QKV}.local_adapter", OUT, ()),
        (f"{MLP}.router.adapter", 8, ()),
        (QKV, OUT, ()),
        (QKV, OUT, ("lora_A.default.weight", "lora_B.default.weight")),
        (QKV, OUT, ("lora_a.weight", "lora_b.weight")),
        (QKV, OUT, ("_lora_adapters.first.lora_a.weight", "_lora_adapters.first.lora_b.weight")),
        ("decoder.layers.0.self_attention.adapter_layer.lora_kqv_adapter", OUT, ()),
    ],
)
def test_both_factors_of_every_naming_at_every_rank(
    stem: str, out: int, names: tuple[str, ...], rank: int
) -> None:
    pair = _pair(stem, rank, out, *names)
    assert adapter_parameters(BASE | pair) == set(pair)


@RANKS
def test_all_that_is_in_an_adapter_belongs_to_it(rank: int) -> None:
    """The magnitude of DoRA, the core of LoRA-XS, a norm."""
    adapter = _pair(f"{QKV}.adapter", rank, OUT) | {
        f"{QKV}.adapter.weight_magnitude": (OUT,),
        f"{QKV}.adapter.core.weight": (rank, rank),
    }
    assert adapter_parameters(BASE | adapter) == set(adapter)


def test_experts_of_one_stack_or_one_by_one() -> None:
    base = {f"{MLP}.experts.linear_fc1.weight{e}": (FFN, H) for e in range(2)}
    stack = {
        f"{MLP}.experts.linear_fc1.adapter.linear_in.weight": (2, 32, H),
        f"{MLP}.experts.linear_fc1.adapter.linear_out.weight": (2, FFN, 32),
    }
    assert adapter_parameters(base | stack) == set(stack)
    single = _pair(f"{MLP}.experts.local_experts.3.linear_fc2.adapter", 32, FFN)
    assert adapter_parameters(BASE | single) == set(single)


@pytest.mark.parametrize(
    "others",
    [
        # A feed-forward layer by these names, wide and narrow.
        {f"{MLP}.linear_in.weight": (FFN, H), f"{MLP}.linear_out.weight": (H, FFN)},
        {f"{MLP}.linear_in.weight": (32, H), f"{MLP}.linear_out.weight": (H, 32)},
        # A gated one, and halves that do not fit.
        {f"{MLP}.linear_in.weight": (2 * FFN, H), f"{MLP}.linear_out.weight": (H, FFN)},
        # A vision model's projector, which many call an adapter: full rank.
        {"adapter.linear_in.weight": (256, H), "adapter.linear_out.weight": (256, 256)},
        {
            "vision_adapter.linear_fc1.weight": (FFN, H),
            "vision_adapter.linear_fc2.weight": (H, FFN),
        },
        # One of the two alone, a vector, multi-latent attention.
        {f"{QKV}.adapter.linear_in.weight": (8, H)},
        {f"{QKV}.adapter.linear_in.bias": (8,), f"{QKV}.adapter.linear_out.bias": (OUT,)},
        {"linear_q_down_proj.weight": (20, H), "linear_q_up_proj.weight": (OUT, 20)},
        {"floral.linear_in.weight": (32, H), "floral.linear_out.weight": (H, 32)},
    ],
)
def test_lookalikes_are_not_adapters(others: dict[str, tuple[int, ...]]) -> None:
    assert not adapter_parameters(BASE | others)


def test_wrappers_are_no_part_of_a_name() -> None:
    for path in (
        f"module.module.{QKV}.to_wrap.weight",
        f"_orig_mod.module.{QKV}.base_layer.weight",
        f"{QKV}.weight",
    ):
        assert unwrapped(path) == f"{QKV}.weight"
    assert unwrapped("module") == unwrapped("") == ""
    assert unwrapped("vision.module.weight") == "vision.module.weight"
