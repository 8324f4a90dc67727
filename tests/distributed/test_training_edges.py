"""Edge cases on real megatron-core: skipped steps, empty models, rules, resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.matrices import Rule
from tests import tiny_gpt
from tests.distributed.checkpointing import state_bytes
from tests.distributed.training import Run, build, make_optimizer, replica_hashes
from tests.ranks import RankFailed, layout

Ranks = Callable[..., list[Any]]


def _gradients(wrapped: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    tiny_gpt.forward_backward(wrapped, tiny_gpt.batch(step, global_batch=16), optimizer)


def _poisoned_step(rank: int, run: Run, value: float, victim: str, tp_rank: int) -> Any:
    (wrapped,), optimizer, _ = build(run)
    _gradients(wrapped, optimizer, 0)
    assert optimizer.step()[0]
    before = (state_bytes(optimizer), replica_hashes([wrapped]))
    steps_before = [group["step"] for group in optimizer.param_groups]
    _gradients(wrapped, optimizer, 1)
    if rank % run.tp == tp_rank:
        for name, parameter in wrapped.named_parameters():
            if name.endswith(victim):
                # On every DP rank, because only the one that owns the element looks at it.
                parameter.main_grad.view(-1)[7] = value
    ok, _, _ = optimizer.step()
    unchanged = before == (state_bytes(optimizer), replica_hashes([wrapped]))
    unchanged &= steps_before == [group["step"] for group in optimizer.param_groups]
    _gradients(wrapped, optimizer, 2)
    again, norm, _ = optimizer.step()
    return ok, unchanged, again, float(norm)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("victim", ["layers.1.mlp.linear_fc2.weight", "final_layernorm.weight"])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(
    ranks: Ranks, value: float, victim: str, tp_rank: int
) -> None:
    """One element on one rank, also of a layer norm that the global norm counts on TP rank 0."""
    run = Run(tp=2, dp=2, config=MatrixConfig(exchange_buffer_mb=0.06))
    for ok, unchanged, again, norm in ranks(4, _poisoned_step, run, value, victim, tp_rank):
        assert not ok
        assert unchanged
        assert again and norm == norm


def test_a_loss_scaler_skips_the_step_as_for_adam(ranks: Ranks) -> None:
    def body(rank: int) -> Any:
        from megatron.core.optimizer import OptimizerConfig

        import megatron_muon

        layout(tp=2)
        wrapped = tiny_gpt.wrap_ddp(tiny_gpt.build_gpt(params_dtype=torch.bfloat16))
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            params_dtype=torch.bfloat16,
            loss_scale=1024.0,
            use_distributed_optimizer=True,
        )
        optimizer = megatron_muon.get_matrix_optimizer(config, [wrapped])
        optimizer.zero_grad()
        tiny_gpt.forward_backward(wrapped, tiny_gpt.batch(0), optimizer)
        if rank == 3:
            wrapped.buffers[0].grad_data.fill_(float("inf"))
        before = state_bytes(optimizer)
        return optimizer.step()[0], before == state_bytes(optimizer)

    assert ranks(4, body) == [(False, True)] * 4


def test_frozen_parameters_stay_and_the_rest_trains(ranks: Ranks) -> None:
    def body(rank: int) -> Any:
        layout(tp=2)
        model = tiny_gpt.build_gpt()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1" in name and "linear_fc" in name)
        wrapped = tiny_gpt.wrap_ddp(model)
        optimizer = make_optimizer(Run(), [wrapped])
        first = tiny_gpt.gather_full(wrapped)
        _gradients(wrapped, optimizer, 0)
        assert optimizer.step()[0]
        last = tiny_gpt.gather_full(wrapped)
        (child,) = optimizer.chained_optimizers
        return {n for n in first if not torch.equal(first[n], last[n])}, len(child.plan.matrices)

    changed, matrices = ranks(4, body)[0]
    assert changed == {
        "decoder.layers.1.mlp.linear_fc1.weight",
        "decoder.layers.1.mlp.linear_fc2.weight",
    }
    assert matrices == 3


def test_everything_to_adam_equals_adam(ranks: Ranks) -> None:
    """A rule sends every matrix to Adam: the run is megatron-core's Adam, bit for bit."""

    def body(rank: int, optimizer: str) -> Any:
        config = MatrixConfig(rules=(Rule(pattern="*", optimizer="adam"),))
        run = Run(tp=2, dp=2, optimizer=optimizer, config=config, overlap=True)
        (wrapped,), built, _ = build(run)
        for step in range(3):
            _gradients(wrapped, built, step)
            assert built.step()[0]
        return tiny_gpt.gather_full(wrapped)

    ours, theirs = (ranks(4, body, optimizer)[0] for optimizer in ("dmuon", "adam"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_a_matrix_with_zero_gradient_only_decays(ranks: Ranks) -> None:
    def body(rank: int) -> Any:
        (wrapped,), optimizer, _ = build(Run(tp=2, dp=2))
        first = tiny_gpt.gather_full(wrapped)
        _gradients(wrapped, optimizer, 0)
        for name, parameter in wrapped.named_parameters():
            if name.endswith("layers.0.self_attention.linear_proj.weight"):
                parameter.main_grad.zero_()
        lr = optimizer.param_groups[0]["lr"]
        assert optimizer.step()[0]
        return first, tiny_gpt.gather_full(wrapped), lr

    first, last, lr = ranks(4, body)[0]
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    assert torch.allclose(last[name], first[name] * (1 - lr * 0.1), rtol=1e-6, atol=0)
    assert not torch.equal(last[name], first[name])


def test_rules_come_before_defaults(ranks: Ranks) -> None:
    """Learning rate, weight decay, split and route of single parameters, as the rules say."""
    rules = (
        Rule(pattern="*.linear_proj.weight", lr_mult=0.0),
        Rule(pattern="*.linear_fc2.weight", optimizer="adam"),
        Rule(pattern="decoder.final_layernorm.weight", wd_mult=0.5),
        Rule(pattern="*.0.self_attention.linear_qkv.weight", split="none"),
        Rule(pattern="*.linear_fc1.weight", lr_mult=0.5, wd_mult=0.0),
    )

    def body(rank: int) -> Any:
        config = MatrixConfig(rules=rules, lr=4e-2, min_lr=4e-3, weight_decay=0.3)
        _, optimizer, _ = build(Run(tp=2, dp=2, config=config))
        (child,) = optimizer.chained_optimizers
        names = {id(main): child.setup.names[p] for p, main in child._main_shards.items()}
        groups = {
            names[id(p)]: (g["max_lr"], g["min_lr"], g["weight_decay"], g.get("optimizer"))
            for g in child.optimizer.param_groups
            for p in g["params"]
        }
        return groups, [m.name for m in child.plan.matrices]

    results = ranks(4, body)
    groups = {name: value for result in results for name, value in result[0].items()}
    at = "decoder.layers.1"
    assert groups[f"{at}.self_attention.linear_proj.weight"] == (0.0, 0.0, 0.3, "dmuon")
    assert groups[f"{at}.self_attention.linear_qkv.weight"] == (4e-2, 4e-3, 0.3, "dmuon")
    assert groups[f"{at}.mlp.linear_fc1.weight"] == (2e-2, 2e-3, 0.0, "dmuon")
    assert groups[f"{at}.mlp.linear_fc2.weight"] == (2e-2, 2e-3, 0.1, None)
    assert groups["decoder.final_layernorm.weight"] == (2e-2, 2e-3, 0.05, None)
    assert groups["embedding.word_embeddings.weight"] == (2e-2, 2e-3, 0.1, None)
    matrices = results[0][1]
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in matrices
    assert "decoder.layers.1.self_attention.linear_qkv.weight[q]" in matrices


@pytest.mark.parametrize(
    ("config", "sentences"),
    [
        (
            MatrixConfig(rules=(Rule(pattern="nothing.like.this", lr_mult=1.0),)),
            ["rule 'nothing.like.this'", "matches no trainable parameter"],
        ),
        (
            MatrixConfig(
                rules=(Rule(pattern="*layernorm.weight", optimizer="matrix"),),
                num_ns_steps=0,
                scale_mode="huge",
                exchange_buffer_mb=-1.0,
            ),
            ["layernorm.weight", "--muon-num-ns-steps", "--muon-scale-mode", "buffer-mb"],
        ),
        (MatrixConfig(coefficient_type="septic"), ["--muon-coefficient-type", "septic"]),
        (
            MatrixConfig(exchange_buffer_mb=0.001),
            [
                "--matrix-exchange-buffer-mb 0.001 is too small",
                "type --matrix-exchange-buffer-mb 0.0142",
                "linear_fc1",
            ],
        ),
    ],
)
def test_wrong_settings_are_refused_together_on_every_rank(
    ranks: Ranks, config: MatrixConfig, sentences: list[str]
) -> None:
    def body(rank: int) -> str:
        layout(tp=2)
        wrapped = tiny_gpt.wrap_ddp(tiny_gpt.build_gpt())
        with pytest.raises(ValueError) as refused:
            make_optimizer(Run(config=config), [wrapped])
        return str(refused.value)

    messages = ranks(4, body, timeout=60)
    assert len(set(messages)) == 1
    for sentence in sentences:
        assert sentence in messages[0]


def test_the_number_in_the_refusal_is_the_minimum(ranks: Ranks) -> None:
    def body(rank: int, number: float) -> None:
        layout(tp=2)
        wrapped = tiny_gpt.wrap_ddp(tiny_gpt.build_gpt())
        make_optimizer(Run(config=MatrixConfig(exchange_buffer_mb=number)), [wrapped])

    ranks(4, body, 0.0142, timeout=60)
    with pytest.raises(RankFailed, match="is too small"):
        ranks(4, body, 0.0141, timeout=60)


def test_wrong_megatron_settings_are_refused_together(ranks: Ranks) -> None:
    def body(rank: int) -> str:
        from megatron.core.optimizer import OptimizerConfig

        import megatron_muon

        layout()
        wrapped = tiny_gpt.wrap_ddp(tiny_gpt.build_gpt(), use_distributed_optimizer=False)
        with pytest.raises(ValueError) as refused:
            megatron_muon.get_matrix_optimizer(
                OptimizerConfig(optimizer="sgd", lr=1e-2, optimizer_cpu_offload=True), [wrapped]
            )
        return str(refused.value)

    (message,) = set(ranks(2, body))
    for sentence in ("optimizer='adam'", "use_distributed_optimizer=True", "offload"):
        assert sentence in message


def _made(rank: int, config: dict[str, Any], ddp: dict[str, Any]) -> Any:
    """Rule and splits of an optimizer built without ``MatrixConfig``, or its refusals."""
    from megatron.core.optimizer import OptimizerConfig

    import megatron_muon

    layout(tp=2)
    wrapped = tiny_gpt.wrap_ddp(tiny_gpt.build_gpt(), **ddp)
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, **config)
    try:
        optimizer = megatron_muon.get_matrix_optimizer(settings, [wrapped])
    except ValueError as error:
        return str(error)
    (child,) = optimizer.chained_optimizers
    return child.rule, [matrix.name for matrix in child.plan.matrices]


def test_megatrons_own_settings_of_muon_are_used(ranks: Ranks) -> None:
    """Without a MatrixConfig the muon settings of Megatron's configuration are used."""
    config = {
        "muon_momentum": 0.5,
        "muon_nesterov": True,
        "muon_num_ns_steps": 4,
        "muon_coefficient_type": "simple",
        "muon_scale_mode": "unit_rms_norm",
        "muon_extra_scale_factor": 3.0,
        "muon_split_qkv": False,
    }
    rule, matrices = ranks(2, _made, config, {})[0]
    assert (rule.momentum, rule.nesterov, len(rule.schedule)) == (0.5, True, 4)
    assert (rule.scale_mode, rule.extra_scale_factor) == ("unit_rms_norm", 3.0)
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in matrices


def test_refused_flags_are_refused_by_api(ranks: Ranks) -> None:
    gather = "fp4_param_gather"
    config = {"muon_scalar_optimizer": "lion", "muon_tp_mode": "duplicated"}
    (message,) = set(ranks(2, _made, config, {gather: True}))
    assert message.startswith("megatron_muon: 3 configuration problems")
    for field in (*config, f"DistributedDataParallelConfig.{gather} is True"):
        assert field in message


def test_a_model_without_trainable_parameters_is_refused(ranks: Ranks) -> None:
    def body(rank: int) -> str:
        layout()
        wrapped = tiny_gpt.wrap_ddp(tiny_gpt.build_gpt().requires_grad_(False))
        with pytest.raises(ValueError) as refused:
            make_optimizer(Run(), [wrapped])
        return str(refused.value)

    assert "no parameter of the model is trainable" in ranks(1, body)[0]


def test_ranks_with_different_plans_do_not_start(ranks: Ranks) -> None:
    def body(rank: int) -> str:
        from megatron_muon.exchange import PlanMismatchError

        layout(tp=2)
        wrapped = tiny_gpt.wrap_ddp(
            tiny_gpt.build_gpt(),
            overlap_grad_reduce=True,
            bucket_size=2_000 if rank == 2 else 4_000,
        )
        with pytest.raises(PlanMismatchError) as refused:
            make_optimizer(Run(), [wrapped])
        return str(refused.value)

    messages = ranks(4, body)
    assert all("ranks [2]" in message for message in messages)


def test_scheduler_is_used(ranks: Ranks) -> None:
    """Warm-up reaches the matrix groups as well as Adam's."""

    def body(rank: int) -> Any:
        _, optimizer, schedule = build(Run(config=MatrixConfig(lr=4e-2)))
        schedule.step(1)
        return {(g.get("optimizer"), round(g["lr"], 6)) for g in optimizer.param_groups}

    (groups,) = ranks(1, body)
    assert groups == {("dmuon", 0.0115), (None, 0.0065)}


@pytest.mark.parametrize(
    "rank_two",
    [
        MatrixConfig(momentum=0.8),
        MatrixConfig(nesterov=True),
        MatrixConfig(scale_mode="unit_rms_norm"),
        MatrixConfig(rules=(Rule(pattern="*.linear_proj.weight", lr_mult=0.5),)),
        MatrixConfig(rules=(Rule(pattern="nothing", lr_mult=0.5),)),
        MatrixConfig(exchange_buffer_mb=0.01),
    ],
)
def test_ranks_with_different_settings_do_not_start(ranks: Ranks, rank_two: MatrixConfig) -> None:
    """It would be silent: every rank would apply a different update to its own range."""

    def body(rank: int) -> str:
        layout(tp=2)
        wrapped = tiny_gpt.wrap_ddp(tiny_gpt.build_gpt())
        config = rank_two if rank == 2 else MatrixConfig()
        with pytest.raises(ValueError) as refused:
            make_optimizer(Run(config=config), [wrapped])
        return str(refused.value)

    (message,) = set(ranks(4, body, timeout=60))
    assert "rank 2 has MatrixConfig." in message


def test_ranks_with_different_configurations_of_megatron_do_not_start(ranks: Ranks) -> None:
    def body(rank: int) -> str:
        return str(_made(rank, {"adam_beta2": 0.9 if rank == 1 else 0.95}, {}))

    (message,) = set(ranks(2, body, timeout=60))
    assert "rank 1 has OptimizerConfig.adam_beta2=0.9, rank 0 has 0.95" in message


def _above_the_threshold(rank: int, threshold: float) -> Any:
    """One step of a model without elements on ranks 2 and 3: 64 elements in a bucket of 128."""
    from megatron.core.optimizer import OptimizerConfig

    import megatron_muon

    layout()
    model = tiny_gpt.build_gpt(layers=1, hidden=8, heads=2, query_groups=1, ffn=8)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("linear_proj.weight"))
    wrapped = tiny_gpt.wrap_ddp(model)
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        use_distributed_optimizer=True,
        grad_norm_skip_threshold=threshold,
    )
    optimizer = megatron_muon.get_matrix_optimizer(
        config, [wrapped], matrix_config=MatrixConfig(min_dim=1)
    )
    before = (state_bytes(optimizer), replica_hashes([wrapped]))
    _gradients(wrapped, optimizer, 0)
    stepped, norm, _ = optimizer.step()
    after = (state_bytes(optimizer), replica_hashes([wrapped]))
    (child,) = optimizer.chained_optimizers
    return stepped, before == after, float(norm), len(child.get_parameters())


def test_a_norm_above_the_threshold_skips_the_step_on_every_rank(ranks: Ranks) -> None:
    """Megatron decides it per rank with parameters; the others would step alone."""
    results = ranks(4, _above_the_threshold, 1e-6, timeout=60)
    assert [count for *_, count in results] == [1, 1, 0, 0]
    for stepped, unchanged, norm, _ in results:
        assert (stepped, unchanged) == (False, True)
        assert norm > 1e-6
    for stepped, unchanged, _, count in ranks(4, _above_the_threshold, 1e6):
        assert stepped
        assert not unchanged or not count


@pytest.mark.parametrize("field", ["lr_mult", "wd_mult"])
def test_both_copies_of_a_tied_embedding_follow_one_rule(ranks: Ranks, field: str) -> None:
    """The last pipeline stage calls its copy ``output_layer.weight``."""

    def body(rank: int) -> torch.Tensor:
        layout(pp=2)
        wrapped = tiny_gpt.wrap_ddp(tiny_gpt.build_gpt(tied=True))
        rule = Rule(pattern="embedding.*", **{field: 0.25})
        optimizer = make_optimizer(Run(config=MatrixConfig(rules=(rule,))), [wrapped])
        for step in range(2):
            _gradients(wrapped, optimizer, step)
            assert optimizer.step()[0]
        return tiny_gpt.gather_full(wrapped)["embedding.word_embeddings.weight"]

    first, last = ranks(2, body)
    assert torch.equal(first, last)


def test_a_tied_embedding_cannot_be_a_matrix(ranks: Ranks) -> None:
    def body(rank: int) -> str:
        layout(pp=2)
        wrapped = tiny_gpt.wrap_ddp(tiny_gpt.build_gpt(tied=True))
        rule = Rule(pattern="embedding.*", optimizer="matrix")
        with pytest.raises(ValueError) as refused:
            make_optimizer(Run(config=MatrixConfig(rules=(rule,))), [wrapped])
        return str(refused.value)

    (message,) = set(ranks(2, body))
    assert "tied to a copy on another pipeline stage" in message


def test_rates_hold_without_a_scheduler(ranks: Ranks) -> None:
    """A custom loop need not have Megatron's scheduler."""

    def body(rank: int) -> Any:
        layout()
        wrapped = tiny_gpt.wrap_ddp(tiny_gpt.build_gpt())
        rules = (Rule(pattern="*.linear_proj.weight", lr_mult=0.0, wd_mult=0.0),)
        config = MatrixConfig(lr=4e-2, weight_decay=0.3, rules=rules)
        optimizer = make_optimizer(Run(config=config), [wrapped])
        first = tiny_gpt.gather_full(wrapped)
        _gradients(wrapped, optimizer, 0)
        assert optimizer.step()[0]
        last = tiny_gpt.gather_full(wrapped)
        groups = {(g.get("optimizer"), g["lr"], g["weight_decay"]) for g in optimizer.param_groups}
        return groups, {n for n in first if torch.equal(first[n], last[n])}

    ((groups, unchanged),) = ranks(1, body)
    assert groups == {
        ("dmuon", 4e-2, 0.3),
        ("dmuon", 0.0, 0.0),
        (None, 2e-2, 0.1),
        (None, 2e-2, 0.0),
    }
    assert unchanged == {f"decoder.layers.{i}.self_attention.linear_proj.weight" for i in (0, 1)}


def _with_groups(rank: int, lacking: str, tp: int) -> dict[str, Any] | str:
    """One step with explicit process groups, of which one is missing."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

    import megatron_muon

    layout(tp=tp)
    wrapped = tiny_gpt.wrap_ddp(tiny_gpt.build_gpt())
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if lacking:
        setattr(groups, lacking, None)
    config = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True)
    try:
        optimizer = megatron_muon.get_matrix_optimizer(
            config, [wrapped], pg_collection=groups, use_gloo_process_groups=False
        )
    except ValueError as error:
        return str(error)
    tiny_gpt.train_step(wrapped, optimizer, 0)
    return tiny_gpt.gather_full(wrapped)


def test_a_missing_process_group_is_refused_by_name(ranks: Ranks) -> None:
    (message,) = ranks(1, _with_groups, "tp", 1)
    assert "pg_collection lacks tp: give it" in message


def test_the_exchange_group_is_made_where_megatron_gives_none(ranks: Ranks) -> None:
    """Ranks 0..3 as TP2 x DP2: every rank makes it, and the update is the same."""
    given = ranks(4, _with_groups, "", 2)
    made = ranks(4, _with_groups, "tp_dp_cp", 2)
    for one, other in zip(given, made, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
