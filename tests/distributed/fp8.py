"""Training with quantized weights, step by step, and what every rank must hold after each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.config import MatrixConfig
from tests import tiny_gpt
from tests.distributed.checkpointing import whole_state
from tests.distributed.training import RATES, Run, build, gather, lr_of
from tests.te import extension
from tests.te.weights import quantized, tensors_of, update_delayed_scales
from tests.whole_parameters import cut, global_name, initial, unwrapped


def fp8_run(recipe: str | None, **changes: Any) -> Run:
    """A short run whose learning rates and layouts are demanding."""
    settings: dict[str, Any] = {
        "model": "fp8",
        "fp8": recipe,
        "dtype": torch.bfloat16,
        "steps": 2,
        "sequence_parallel": True,
        "config": MatrixConfig(min_dim=16, rules=RATES),
    }
    return Run(**settings | changes)


def masters(chunks: list[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Whole fp32 masters of this rank's part of the model; all ranks call it."""
    whole = whole_state(chunks, optimizer, only_masters=True)
    return {name: value for (_, name), value in whole.items()}


def weights_of(chunks: list[Any]) -> Iterator[tuple[Any, str, Any]]:
    """(bare model, its name of the parameter, parameter) of every quantized weight."""
    for chunk in chunks:
        bare = unwrapped(chunk)
        for name, parameter in quantized(bare):
            yield bare, name, parameter


def codes(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Copies of all codes, scales and transposed copies, by global name."""
    return {
        f"{global_name(bare, name)}:{kind}": tensor.clone()
        for bare, name, parameter in weights_of(chunks)
        for kind, tensor in tensors_of(parameter).items()
    }


def assert_first_masters(chunks: list[Any], whole: dict[str, torch.Tensor]) -> None:
    """Masters are the bf16 values that were quantized, bit for bit, and these are released."""
    for chunk in chunks:
        bare = unwrapped(chunk)
        for name, parameter in bare.named_parameters():
            first = initial(bare, name, parameter, seed=0).to(parameter.dtype).float()
            assert torch.equal(whole[global_name(bare, name)], first), name
    for _, name, parameter in weights_of(chunks):
        assert parameter.get_high_precision_init_val() is None, f"{name} keeps its first value"


def wrong_codes(chunks: list[Any], whole: dict[str, torch.Tensor]) -> list[str]:
    """What is not the quantization of the whole matrix of masters, in bf16 first."""
    wrong = []
    for bare, name, parameter in weights_of(chunks):
        values = cut(bare, name, parameter, whole[global_name(bare, name)])
        values = values.to(parameter.device, torch.bfloat16)
        quantizer = parameter._quantizer.copy()
        if type(quantizer).__name__ == "Float8Quantizer":
            # Real layers keep their history elsewhere.
            history = getattr(parameter._quantizer, "history", None)
            if history is not None and float(history[0]) != float(values.abs().max()):
                wrong.append(f"amax of {name}")
            quantizer.amax = torch.zeros_like(quantizer.amax)
        expected = tensors_of(quantizer(values.contiguous()))
        for kind, found in tensors_of(parameter).items():
            # Per tensor the transposed copy is made apart.
            want = expected["_data"].t() if kind == "_transpose" else expected[kind]
            if not torch.equal(found, want):
                wrong.append(f"{kind} of {name}")
    return wrong


def unequal_replicas(chunks: list[Any]) -> list[str]:
    """Codes, scales and copies that are not the same on all data-parallel ranks of them."""
    from megatron.core import parallel_state

    wrong = []
    for bare, name, parameter in weights_of(chunks):
        is_expert = not getattr(parameter, "allreduce", True)
        group = (
            parallel_state.get_expert_data_parallel_group()
            if is_expert
            else parallel_state.get_data_parallel_group()
        )
        for kind, found in tensors_of(parameter).items():
            mine = found.contiguous().view(torch.uint8)
            first = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(first, mine, group=group)
            if any(not torch.equal(first[0], other) for other in first):
                wrong.append(f"{kind} of {global_name(bare, name)}")
    return wrong


def finish_gather(chunks: list[Any], optimizer: Any) -> None:
    """Have the new weights now, as Megatron before an evaluation or a save."""
    if chunks[0].ddp_config.overlap_param_gather:
        optimizer.prepare_model_params_for_param_sync()
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


def gradient_step(chunks: list[Any], optimizer: Any, run: Run, step: int) -> float:
    """Forward and backward of one step, as Megatron's training loop."""
    optimizer.zero_grad()
    count = max(2, run.pp)
    micro_batches = tiny_gpt.batch(
        step, global_batch=run.global_batch, micro_batch=run.global_batch // run.dp // count
    )
    loss = tiny_gpt.forward_backward(chunks, micro_batches, optimizer)
    for chunk in chunks:
        update_delayed_scales(unwrapped(chunk))
    return loss


def train_fp8(rank: int, run: Run) -> dict[str, Any]:
    """Train, and assert on every rank and in every step what quantized weights must be.

    Returns:
        Losses, and what ``errors_against_reference`` wants, with masters in the place of weights.
    """
    chunks, optimizer, schedule = build(run)
    whole = masters(chunks, optimizer)
    assert_first_masters(chunks, whole)
    factors = {1.0} | {r.lr_mult for r in run.config.rules if r.lr_mult is not None}
    record: dict[str, Any] = {"first": whole, "losses": [], "norms": [], "zeros": [], "lrs": []}
    record["steps"] = []
    extension.calls.clear()
    tiny_gpt.without_gather(chunks)
    for step in range(run.steps):
        before = codes(chunks)
        record["losses"].append(gradient_step(chunks, optimizer, run, step))
        tiny_gpt.with_gather(chunks)
        gradients = gather(chunks, "main_grad")
        record["lrs"].append({factor: lr_of(schedule, run, factor) for factor in factors})
        succeeded, norm, zeros = optimizer.step()
        assert succeeded
        schedule.step(1)
        record["norms"].append(float(norm))
        record["zeros"].append(float(zeros))
        record["steps"].append((gradients, masters(chunks, optimizer)))
        # Overlapped, the next forward brings the weights; the last step has none.
        if not run.gathers_early or step == run.steps - 1:
            finish_gather(chunks, optimizer)
            assert not (wrong := wrong_codes(chunks, record["steps"][-1][1])), (step, wrong)
            assert not (unequal := unequal_replicas(chunks)), (step, unequal)
            after = codes(chunks)
            data = [name for name in after if name.endswith("_data")]
            still = [name for name in data if torch.equal(after[name], before[name])]
            assert not still, (step, still)
    record["codes"] = codes(chunks)
    record["owned"] = sum(
        parameter in child.model_param_gbuf_map
        for _, _, parameter in weights_of(chunks)
        for child in optimizer.chained_optimizers
    )
    record["last"] = record["steps"][-1][1]
    return record
