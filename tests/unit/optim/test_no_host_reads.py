"""The step reads nothing back from the device: on CUDA each such read would wait for all its work.

Checked twice: in the source of everything that a step runs, and in the operations that steps of
both optimizers dispatch. What the host does read: the gradient norm, which Megatron reads itself to
clip by it; and with Orth-Dion two flags of a wave, whether any matrix has dependent columns.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_muon.exchange import Exchange
from megatron_muon.optim import MatrixRange
from tests.distributed.prescribed import Setting, gradient, initial, model, plan_of, rule_of
from tests.distributed.prescribed_dion import DionSetting, factor_plan_of
from tests.distributed.prescribed_dion import rule_of as dion_rule_of

PACKAGE = Path(__file__).parents[3] / "megatron_muon"
HOT = (
    *("linalg/newton_schulz.py", "linalg/products.py"),
    *("linalg/precision.py", "linalg/workspace.py"),
    *("exchange/mailbox.py", "exchange/runner.py", "exchange/panels.py"),
    *("optim/muon.py", "optim/orth_dion.py", "optim/factors.py", "optim/dion_owner.py"),
    *("optim/dion_state.py", "optim/held_batch.py"),
    *("integration/updates.py", "integration/combined_optimizer.py"),
)
READS = {"item", "cpu", "tolist", "numpy", "synchronize", "nonzero", "is_nonzero", "any", "all"}
DISPATCHED = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item", "unique"}


def host_reads(source: str) -> list[str]:
    """Calls of methods and functions that make the host wait for a tensor."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            waits = name in READS and not ast.unparse(node.func).startswith(("dist.", "self."))
            if waits or ast.unparse(node.func).startswith("torch.cuda."):
                found.append(f"line {node.lineno}: {ast.unparse(node.func)}")
    return found


@pytest.mark.parametrize("file", HOT)
def test_the_source_of_the_step_reads_nothing(file: str) -> None:
    allowed = {
        "linalg/precision.py": ["torch.cuda.get_device_capability"],
        "optim/dion_state.py": ["torch.cat(together).any"],
    }.get(file, [])
    found = host_reads((PACKAGE / file).read_text(encoding="utf-8"))
    assert [one for one in found if one.split(": ")[1] not in allowed] == []


def test_a_read_would_be_found() -> None:
    assert len(host_reads("x.norm().item()\ny = x.cpu()\ntorch.cuda.synchronize()")) == 3


class Operations(TorchDispatchMode):
    """Notes what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def names(self) -> set[str]:
        return set(self.counts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def ranges_of(plan: Any, entries: Any, dtype: torch.dtype) -> list[MatrixRange]:
    by_name = {e.name: e for e in entries}
    found = []
    for parameter in plan.parameters:
        master = initial(by_name[parameter.name], dtype).reshape(-1).clone()
        grad = gradient(by_name[parameter.name], 0, dtype).reshape(-1)
        state = torch.zeros_like(master)
        found.append(
            MatrixRange(master=master, momentum=state, grad=grad, lr=0.1, weight_decay=0.1)
        )
    return found


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_of_dmuon_dispatches_no_read(dtype: torch.dtype, nesterov: bool) -> None:
    setting = Setting(tp=1, dp=1, dtype=torch.float32, nesterov=nesterov)
    plan = plan_of(setting, model())
    rule = replace(rule_of(setting), compute_dtype=torch.float32)
    exchange = Exchange(
        plan,
        rank=0,
        transport=None,  # type: ignore[arg-type]
        dtypes=rule.dtypes,
        device=torch.device("cpu"),
    )
    ranges = ranges_of(plan, model(), torch.float32)
    with Operations() as ran:
        replace(rule, compute_dtype=dtype).step(ranges, exchange, {})
    assert "bmm" in ran.names
    assert not ran.names & DISPATCHED


@pytest.mark.parametrize("kind", ["qr", "polar", "colnorm"])
@pytest.mark.parametrize("scheme", ["factors", "matrix"])
def test_a_step_of_orth_dion_reads_no_more_than_flags_of_rank(scheme: Any, kind: str) -> None:
    setting = DionSetting(tp=1, dp=1, dtype=torch.float32, scheme=scheme, right_factor=kind)
    plan, device = factor_plan_of(setting, model()), torch.device("cpu")
    rule = dion_rule_of(setting)
    exchange = Exchange(plan, rank=0, transport=None, dtypes=rule.dtypes, device=device)  # type: ignore[arg-type]
    factors = rule.first_state(plan, 0, device)
    ranges = ranges_of(plan, model(), torch.float32)
    with Operations() as ran:
        rule.step(ranges, exchange, factors)
    assert ran.names & {"mm", "bmm"}
    assert ran.names & DISPATCHED <= {"_local_scalar_dense"}
    assert 0 < ran.counts["_local_scalar_dense"] <= 2 * len(plan.main.waves) + 1
