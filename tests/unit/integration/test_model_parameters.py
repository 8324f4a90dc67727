"""What is read from a model: packings, cuts, names and routes of every kind of parameter.

Layers of Transformer Engine and Mamba do not run without a GPU, so these are modules with the
names, shapes and attributes that megatron-core 0.19 gives; each says where it gives them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_muon.config import MatrixConfig
from megatron_muon.integration.model_parameters import ModelParameter, model_parameters
from megatron_muon.integration.routes import RoutedParameter, route_all
from megatron_muon.matrices import RowPacking, Rule, ShardedParameter, logical_matrices

CONFIG = SimpleNamespace(
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=6,
    gated_linear_unit=True,
    qk_head_dim=6,
    qk_pos_emb_head_dim=2,
    v_head_dim=4,
    kv_lora_rank=12,
    q_lora_rank=20,
    attention_output_gate=False,
)
H = 40


class TEColumnParallelLinear(nn.Module):
    """``weight`` and attributes as ``TELinear.__init__`` and TE's ``set_tensor_model_parallel``."""

    def __init__(self, rows: int, cols: int, *, cut: int | None = 0, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, cols))
        self.bias = nn.Parameter(torch.empty(rows))
        marks = {"tensor_model_parallel": cut is not None, "partition_dim": cut or 0, **attributes}
        for name, value in marks.items():
            setattr(self.weight, name, value)


class TELinear(TEColumnParallelLinear):
    """``parallel_mode="duplicated"``: not cut, whatever ``partition_dim`` says (M#7395)."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__(rows, cols, cut=None)


class TEGroupedLinear(nn.Module):
    """``weight0`` … of the experts, or one 3-D ``weight`` (``moe_single_grouped_weight``)."""

    def __init__(self, experts: int, rows: int, cols: int, *, cut: int, single: bool) -> None:
        super().__init__()
        shapes = [(experts, rows, cols)] if single else [(rows, cols)] * experts
        for number, shape in enumerate(shapes):
            weight = nn.Parameter(torch.empty(shape))
            # ``_set_expert_parameter_attributes``: partition_dim counts within one expert.
            weight.allreduce = False  # type: ignore[attr-defined]
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            weight.partition_dim = cut  # type: ignore[attr-defined]
            weight.partition_stride = 1  # type: ignore[attr-defined]
            self.register_parameter("weight" if single else f"weight{number}", weight)


def _module(config: Any = CONFIG, /, **children: Any) -> nn.Module:
    module = nn.Module()
    module.config = config  # type: ignore[assignment]
    for name, child in children.items():
        setattr(module, name, child)
    return module


def _found(model: nn.Module, *, tp: int = 1, expert_tp: int = 1) -> dict[str, ModelParameter]:
    return {p.name: p for p in model_parameters([model], tp=tp, expert_tp=expert_tp)}


def _shapes(parameter: ModelParameter, split: Any = "parts") -> dict[str, tuple[int, int]]:
    """Logical matrices of a parameter, by what follows its name."""
    rows, cols = parameter.facts.shape
    whole = ShardedParameter(
        name="",
        global_shape=(rows, cols),
        tp_dim=None,
        tp=1,
        ranges=((0, rows * cols * len(parameter.stack or (0,))),),
        packing=parameter.packing,
        stack=parameter.stack,
    )
    return {m.name: m.shape for m in logical_matrices(whole, split=split)}


def _routed(model: nn.Module, *rules: Rule, **settings: Any) -> dict[str, RoutedParameter]:
    routed, problems = route_all(
        model_parameters([model], tp=1, expert_tp=1), MatrixConfig(rules=rules, **settings)
    )
    assert not problems
    return {r.parameter.name: r for r in routed}


class TestAttention:
    def model(self, **changed: Any) -> nn.Module:
        config = SimpleNamespace(**(vars(CONFIG) | changed))
        rows = (8 + 2 * config.num_query_groups) * 6 + (48 if config.attention_output_gate else 0)
        return _module(config, linear_qkv=TEColumnParallelLinear(rows, H))

    @pytest.mark.parametrize("groups", [1, 2, 4, 8])
    def test_mqa_gqa_and_plain_attention(self, groups: int) -> None:
        found = _found(self.model(num_query_groups=groups))["linear_qkv.weight"]
        assert found.family == "qkv"
        assert _shapes(found) == {"[q]": (48, H), "[k]": (6 * groups, H), "[v]": (6 * groups, H)}

    def test_gated_attention(self) -> None:
        """M#4728, M#4731: the gate has as many rows as the queries, and lies behind them."""
        found = _found(self.model(attention_output_gate=True))["linear_qkv.weight"]
        assert [(p.name, p.rows) for p in found.packing.parts] == [
            *(("q", 12), ("gate", 12), ("k", 6), ("v", 6)),
        ]

    def test_every_head_on_its_own(self) -> None:
        shapes = _shapes(_found(self.model())["linear_qkv.weight"], "heads")
        assert list(shapes) == [
            *(f"[{p}]" for g in range(4) for p in (f"q{2 * g}", f"q{2 * g + 1}", f"k{g}", f"v{g}"))
        ]
        assert set(shapes.values()) == {(6, H)}

    def test_groups_fewer_than_tp_are_decided_on_the_global_shape(self) -> None:
        """M#7117, M#6326, M#7085: no silent fallback where TP cuts through a group."""
        local = _module(linear_qkv=TEColumnParallelLinear(16 * 6 // 8, H))
        found = _found(local, tp=8)["linear_qkv.weight"]
        assert found.facts.shape == (16 * 6, H)
        assert found.packing.problem(found.facts.shape[0], cut=8) is None
        assert _shapes(found) == {"[q]": (48, H), "[k]": (24, H), "[v]": (24, H)}

    def test_bias_of_qkv_is_adams(self) -> None:
        assert _routed(self.model())["linear_qkv.bias"].route.reason == "norm or bias"

    def test_cross_attention(self) -> None:
        model = _module(linear_q=TEColumnParallelLinear(48, H), linear_kv=TELinear(96, H))
        assert _shapes(_found(model)["linear_kv.weight"]) == {"[k]": (48, H), "[v]": (48, H)}
        assert _found(model)["linear_q.weight"].packing.rows is RowPacking.WHOLE


class TestMultiLatentAttention:
    def model(self) -> nn.Module:
        """Sizes of ``MLASelfAttention.__init__``; down-projections duplicated as with TE."""
        return _module(
            linear_q_down_proj=TELinear(20, H),
            linear_q_up_proj=TEColumnParallelLinear(8 * 8 // 2, 20),
            linear_kv_down_proj=TELinear(14, H),
            linear_kv_up_proj=TEColumnParallelLinear(8 * 10 // 2, 12),
            linear_proj=TEColumnParallelLinear(H, 8 * 4 // 2, cut=1),
        )

    def test_replicated_down_projections_are_not_shards(self) -> None:
        """M#7395: partition_dim is 0 on them all the same."""
        found = _found(self.model(), tp=2)
        for name in ("linear_q_down_proj.weight", "linear_kv_down_proj.weight"):
            assert found[name].tp_dim is None
            assert found[name].facts.shape[0] == {"q": 20, "k": 14}[name[7]]
        assert found["linear_proj.weight"].tp_dim == 1
        assert found["linear_q_up_proj.weight"].tp_dim == 0

    def test_kinds_are_the_matrices_of_the_paper(self) -> None:
        found = _found(self.model(), tp=2)
        assert _shapes(found["linear_q_up_proj.weight"]) == {"[nope]": (48, 20), "[rope]": (16, 20)}
        assert _shapes(found["linear_kv_up_proj.weight"]) == {"[k]": (48, 12), "[v]": (32, 12)}
        assert _shapes(found["linear_kv_down_proj.weight"]) == {
            "[latent]": (12, H),
            "[rope]": (2, H),
        }
        assert _shapes(found["linear_q_down_proj.weight"]) == {"": (20, H)}

    def test_heads(self) -> None:
        shapes = _shapes(_found(self.model(), tp=2)["linear_kv_up_proj.weight"], "heads")
        assert list(shapes)[:4] == ["[k0]", "[v0]", "[k1]", "[v1]"]
        assert len(shapes) == 16

    def test_kv_down_cut_by_the_local_spec_is_cut_through_its_parts(self) -> None:
        model = _module(linear_kv_down_proj=TEColumnParallelLinear(7, H))
        found = _found(model, tp=2)["linear_kv_down_proj.weight"]
        assert found.facts.shape == (14, H)
        assert found.packing.rows is RowPacking.UNITS

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [({}, "parts"), ({"split_mla": False}, "none"), ({"split_heads": True}, "heads")],
    )
    def test_settings(self, settings: dict[str, Any], expected: str) -> None:
        found = _routed(self.model(), min_dim=1, **settings)
        assert found["linear_kv_up_proj.weight"].split == expected
        assert found["linear_q_down_proj.weight"].split == "none"


class TestExperts:
    def model(self, single: bool, cut_rows: int = 1) -> nn.Module:
        """Experts 4, 5, 6 of a mixture, gated; with expert-TP 2 each rank has half."""
        experts = _module(
            linear_fc1=TEGroupedLinear(3, 2 * 24 // cut_rows, H, cut=0, single=single),
            linear_fc2=TEGroupedLinear(3, H, 24 // cut_rows, cut=1, single=single),
        )
        layer = _module(experts=experts)
        layer.local_expert_indices = [4, 5, 6]  # type: ignore[assignment]
        return _module(mlp=layer)

    def test_one_weight_per_expert_is_named_by_its_global_number(self) -> None:
        found = _found(self.model(False))
        assert list(found) == [
            f"mlp.experts.linear_fc{fc}.weight{e}" for fc in (1, 2) for e in (4, 5, 6)
        ]
        for name, parameter in found.items():
            assert parameter.is_expert
            assert parameter.stack is None
            assert parameter.family == ("gate_up" if "fc1" in name else "")

    def test_gate_and_up_of_experts_are_two_matrices(self) -> None:
        """M#6688, M#7077, M#7078: their partition_stride is 1, the config is asked."""
        for single in (False, True):
            found = _found(self.model(single, 2), expert_tp=2)
            first = next(iter(found.values()))
            assert first.facts.shape == (48, H)
            assert set(_shapes(first).values()) == {(24, H)}

    def test_a_stack_of_experts_is_a_matrix_each(self) -> None:
        found = _found(self.model(True, 2), tp=4, expert_tp=2)
        fc1, fc2 = found["mlp.experts.linear_fc1.weight"], found["mlp.experts.linear_fc2.weight"]
        assert (fc1.stack, fc1.facts.shape, fc1.tp_dim) == ((4, 5, 6), (48, H), 0)
        assert (fc2.stack, fc2.facts.shape, fc2.tp_dim) == ((4, 5, 6), (H, 24), 1)
        assert _shapes(fc2) == {"[4]": (H, 24), "[5]": (H, 24), "[6]": (H, 24)}
        assert list(_shapes(fc1))[:2] == ["[4.gate]", "[4.up]"]

    def test_stacks_are_matrices_by_default_and_by_rule(self) -> None:
        model = self.model(True)
        assert all(r.is_matrix for r in _routed(model, min_dim=8).values())
        assert all(
            r.is_matrix for r in _routed(model, Rule(pattern="*", optimizer="matrix")).values()
        )
        adam = _routed(model, Rule(pattern="*fc1*", optimizer="adam"), min_dim=8)
        assert not adam["mlp.experts.linear_fc1.weight"].is_matrix

    def test_expert_tp_holds_for_experts_and_tp_for_the_rest(self) -> None:
        model = _module(mlp=self.model(False), linear_proj=TEColumnParallelLinear(H, 8, cut=1))
        found = _found(model, tp=4, expert_tp=1)
        assert found["linear_proj.weight"].facts.shape == (H, 32)
        assert found["mlp.mlp.experts.linear_fc2.weight5"].tp_dim is None

    def test_sequential_experts_are_named_by_their_global_number(self) -> None:
        experts = _module(local_experts=nn.ModuleList([_module(linear_fc1=TELinear(48, H))] * 1))
        layer = _module(experts=experts)
        layer.local_expert_indices = [3]  # type: ignore[assignment]
        assert "mlp.experts.local_experts.3.linear_fc1.weight" in _found(_module(mlp=layer))


class TestStateSpace:
    SIZES = (32, 32, 16, 16, 4)

    def test_mamba_in_proj_is_its_five_parts(self) -> None:
        """M#5015, M#4091: ``partition_sizes`` of ``MambaMixer.__init__`` are those of one rank."""
        model = _module(in_proj=TEColumnParallelLinear(100, H, partition_sizes=list(self.SIZES)))
        found = _found(model, tp=2)["in_proj.weight"]
        assert (found.family, found.packing.rows) == ("ssm", RowPacking.BLOCKS)
        assert _shapes(found) == {
            "[z]": (64, H),
            "[x]": (64, H),
            "[B]": (32, H),
            "[C]": (32, H),
            "[dt]": (8, H),
        }
        assert _routed(model)["in_proj.weight"].split == "parts"
        assert _routed(model, split_ssm=False)["in_proj.weight"].split == "none"

    def test_gated_delta_net(self) -> None:
        mixer = _module(in_proj=TEColumnParallelLinear(42, H))
        mixer.in_proj_split_names = ["query", "key", "value", "z", "beta", "alpha"]  # type: ignore[assignment]
        mixer.in_proj_split_sections = (8, 8, 12, 12, 1, 1)  # type: ignore[assignment]
        found = _found(mixer, tp=2)["in_proj.weight"]
        assert _shapes(found)["[value]"] == (24, H)
        assert sum(rows for rows, _ in _shapes(found).values()) == 84

    def test_convolution_and_vectors_are_adams(self) -> None:
        model = _module(conv1d=nn.Conv1d(64, 64, 4, groups=64), out_proj=TELinear(H, 64))
        model.A_log = nn.Parameter(torch.empty(8))
        routed = _routed(model)
        assert routed["conv1d.weight"].route.reason == "3-D"
        assert routed["A_log"].route.reason == "norm or bias"
        assert routed["out_proj.weight"].is_matrix


class TestAdapters:
    """Megatron-Bridge's ``LoRALinear`` and ``ParallelLinearAdapter``: TP cuts the rank of A."""

    def model(self, rank: int, *, tp: int = 1, frozen: bool = True) -> nn.Module:
        base = TEColumnParallelLinear(96 // tp, H)
        adapter = _module(
            linear_in=TEColumnParallelLinear(rank // tp, H),
            linear_out=TEColumnParallelLinear(96 // tp, rank),
        )
        if frozen:
            base.requires_grad_(False)
        return _module(self_attention=_module(linear_qkv=_module(to_wrap=base, adapter=adapter)))

    @pytest.mark.parametrize("rank", [8, 32, 64])
    def test_adapters_are_adams_at_every_rank_unless_a_rule_says_else(self, rank: int) -> None:
        names = [f"self_attention.linear_qkv.adapter.linear_{x}.weight" for x in ("in", "out")]
        routed = _routed(self.model(rank))
        assert {name: routed[name].route.reason for name in names} == dict.fromkeys(
            names, "low-rank adapter"
        )
        assert not any(r.is_matrix for r in routed.values())
        routed = _routed(self.model(rank), Rule(pattern="*.linear_out.weight", optimizer="matrix"))
        assert [n for n, r in routed.items() if r.is_matrix] == names[1:]

    @pytest.mark.parametrize("tp", [1, 2])
    def test_the_adapted_weight_keeps_name_and_packing(self, tp: int) -> None:
        """Megatron-Bridge saves it under this name, too; unfrozen it is split as ever."""
        found = _found(self.model(32, tp=tp, frozen=False), tp=tp)
        qkv = found["self_attention.linear_qkv.weight"]
        assert _shapes(qkv) == {"[q]": (48, H), "[k]": (24, H), "[v]": (24, H)}
        assert not qkv.facts.is_adapter
        factor = found["self_attention.linear_qkv.adapter.linear_in.weight"]
        assert (factor.facts.is_adapter, factor.facts.shape) == (True, (32, H))


class TestTheRest:
    def test_routers_positions_and_thin_matrices_are_adams_unless_a_rule_says_else(self) -> None:
        class TopKRouter(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.empty(64, H))

        model = _module(
            router=TopKRouter(),
            position_embeddings=nn.Embedding(64, H),
            linear_in=TELinear(16, H),
            linear_fc2=TELinear(H, 64),
        )
        names = ["router.weight", "position_embeddings.weight", "linear_in.weight"]
        routed = _routed(model)
        assert [routed[n].route.reason for n in names] == [
            *("router", "embedding or output layer", "a side shorter than 32")
        ]
        assert routed["linear_fc2.weight"].is_matrix
        assert _routed(model, min_dim=16)["linear_in.weight"].is_matrix
        turned = _routed(
            model,
            Rule(pattern="*", optimizer="adam"),
            *(Rule(pattern=name, optimizer="matrix") for name in names),
        )
        assert [n for n, r in turned.items() if r.is_matrix] == [n for n in turned if n in names]

    def test_a_rule_on_more_than_three_dimensions_is_refused(self) -> None:
        model = _module(conv=nn.Conv2d(64, 64, 3))
        found = model_parameters([model], tp=1, expert_tp=1)
        settings = MatrixConfig(rules=(Rule(pattern="conv.weight", optimizer="matrix"),))
        _, (problem,) = route_all(found, settings)
        assert "4 dimensions" in problem

    def test_the_rules_split_comes_before_the_settings(self) -> None:
        model = TestAttention().model()
        for split in ("none", "parts", "heads"):
            rule = Rule(pattern="*qkv*", split=split)
            assert _routed(model, rule, split_qkv=False)["linear_qkv.weight"].split == split
        rule = Rule(pattern="*qkv*", split="default")
        assert _routed(model, rule, split_qkv=False)["linear_qkv.weight"].split == "none"

    def test_layers_are_numbered_over_all_stages(self) -> None:
        def layer(number: int) -> nn.Module:
            found = _module(mlp=_module(linear_fc2=TELinear(H, H)))
            found.layer_number = number  # type: ignore[assignment]
            return found

        chunks = [
            _module(decoder=_module(layers=nn.ModuleList([layer(first), layer(first + 1)])))
            for first in (3, 7)
        ]
        names = [p.name for p in model_parameters(chunks, tp=1, expert_tp=1)]
        assert names[::2] == [f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in (2, 3, 6, 7)]

    def test_a_name_that_two_chunks_share_is_told_apart(self) -> None:
        chunks = [_module(head=TELinear(H, H)), _module(head=TELinear(H, H))]
        names = [p.name for p in model_parameters(chunks, tp=1, expert_tp=1)]
        assert names == [f"chunk_{c}.head.{leaf}" for c in (0, 1) for leaf in ("weight", "bias")]
