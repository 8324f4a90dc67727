"""Routing of every kind of parameter; the user's rule takes precedence."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_muon.matrices import ParameterFacts, Route, Rule, default_route, route


def _facts(**changed: Any) -> ParameterFacts:
    """The weight of a linear layer, but for what is changed."""
    facts: dict[str, Any] = {
        "name": "decoder.layers.0.mlp.linear_fc1.weight",
        "shape": (96, 32),
        "is_linear_weight": True,
        "is_embedding_or_output": False,
        "is_router": False,
        "is_tied": False,
    }
    return ParameterFacts(**(facts | changed))


KINDS = {
    "linear weight": (_facts(), "matrix"),
    "word embedding": (_facts(is_linear_weight=False, is_embedding_or_output=True), "adam"),
    "output layer": (_facts(is_embedding_or_output=True), "adam"),
    "tied output layer": (_facts(is_embedding_or_output=True, is_tied=True), "adam"),
    "tied linear weight": (_facts(is_tied=True), "adam"),
    "router": (_facts(is_linear_weight=False, is_router=True), "adam"),
    "router that is a linear layer": (_facts(is_router=True), "adam"),
    "norm or bias": (_facts(shape=(96,), is_linear_weight=False), "adam"),
    "1-D weight of a linear layer": (_facts(shape=(96,)), "adam"),
    "scalar": (_facts(shape=(), is_linear_weight=False), "adam"),
    "convolution": (_facts(shape=(96, 32, 4), is_linear_weight=False), "adam"),
    "grouped experts in one tensor": (_facts(shape=(96, 32, 4)), "adam"),
    "thin": (_facts(shape=(4096, 16)), "adam"),
    "factor of a low-rank adapter": (_facts(is_adapter=True), "adam"),
    "one output": (_facts(shape=(1, 4096)), "adam"),
    "as wide as need be": (_facts(shape=(32, 4096)), "matrix"),
    "2-D, not of a linear layer": (_facts(is_linear_weight=False), "adam"),
}
EVERY_KIND = pytest.mark.parametrize(("facts", "optimizer"), KINDS.values(), ids=KINDS)


@EVERY_KIND
def test_only_2d_weights_of_linear_layers_are_matrices(
    facts: ParameterFacts, optimizer: str
) -> None:
    assert default_route(facts, min_dim=32).optimizer == optimizer


@EVERY_KIND
def test_a_rule_without_an_optimizer_leaves_the_default(
    facts: ParameterFacts, optimizer: str
) -> None:
    rule = Rule(pattern=facts.name, lr_mult=0.5, split="none")
    assert route(facts, rule, min_dim=32) == default_route(facts, min_dim=32)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (_facts(), "linear weight"),
        (_facts(is_embedding_or_output=True, is_tied=True), "embedding or output layer"),
        (_facts(is_tied=True), "tied weight"),
        (_facts(is_router=True), "router"),
        (_facts(is_adapter=True, is_embedding_or_output=True), "low-rank adapter"),
        (_facts(shape=(96,)), "norm or bias"),
        (_facts(shape=(96, 32, 4)), "3-D"),
        (_facts(shape=(31, 64)), "a side shorter than 32"),
        (_facts(is_linear_weight=False), "not the weight of a linear layer"),
    ],
)
def test_the_reason_describes_the_parameter(facts: ParameterFacts, reason: str) -> None:
    assert default_route(facts, min_dim=32).reason == reason


@EVERY_KIND
def test_a_rule_sends_anything_to_adam(facts: ParameterFacts, optimizer: str) -> None:
    chosen = route(facts, Rule(pattern="*", optimizer="adam"), min_dim=32)
    assert chosen == Route(optimizer="adam", reason="rule")


@EVERY_KIND
def test_a_rule_sends_anything_2d_to_the_matrix_optimizer(
    facts: ParameterFacts, optimizer: str
) -> None:
    rule = Rule(pattern="*", optimizer="matrix")
    if facts.is_tied:
        with pytest.raises(ValueError, match="tied to a copy on another pipeline stage"):
            route(facts, rule, min_dim=32)
        return
    if len(facts.shape) == 2:
        assert route(facts, rule, min_dim=32) == Route(optimizer="matrix", reason="rule")
        return
    with pytest.raises(ValueError) as error:
        route(facts, rule, min_dim=32)
    assert facts.name in str(error.value)
    assert f"{len(facts.shape)} dimensions" in str(error.value)
    assert "narrow the rule's pattern" in str(error.value)
