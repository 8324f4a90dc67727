"""Checks with megatron-core on the ranks of this machine: FP8 weights, step times, split matrices.

On a GPU weights are those of Transformer Engine's layers; on CPU, where only the checks themselves
are tested, those of ``tests/te``.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import LR, Contender, contenders
from benchmarks.models import ModelSize
from megatron_muon import MatrixConfig
from megatron_muon.benchmark import median_ms
from megatron_muon.matrices import Rule
from tests import tiny_gpt
from tests.distributed import checkpointing
from tests.distributed.fp8 import (
    codes,
    finish_gather,
    fp8_run,
    masters,
    unequal_replicas,
    weights_of,
    wrong_codes,
)
from tests.distributed.training import Run, build, make_optimizer, scheduler
from tests.ranks import layout
from tests.te.weights import delayed_scales, quantized, tensors_of, update_delayed_scales
from tests.tiny_models import ALL_MODELS
from tests.whole_parameters import cut, global_name
from tools.gpu_checks.outcome import Figures, NotPossible, require

SIZES = {
    "cuda": ModelSize(
        layers=1, hidden=4096, ffn=11008, heads=32, query_groups=8, vocab=4096, sequence=512
    ),
    "cpu": ModelSize(layers=1, hidden=64, ffn=128, heads=4, query_groups=2, vocab=64, sequence=16),
}


LAYERS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "fp8-moe": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 256,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    },
    "mla": {
        "multi_latent_attention": True,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_head_dim": 64,
        "qk_pos_emb_head_dim": 32,
        "v_head_dim": 64,
        "rope_type": "rope",
        "num_query_groups": 4,
    },
    "output": {"fp8_output_proj": True},
}
"""Model to its layers; the last two on a GPU only."""


def _run(recipe: str, *, model: str = "fp8", overlap: bool = False) -> Run:
    world = dist.get_world_size()
    tp = 2 if world >= 4 and model != "fp8-moe" else 1
    return fp8_run(recipe, model=model, tp=tp, dp=world // tp, overlap=overlap)


def _model_of_te(run: Run, device: torch.device) -> Any:
    """A GPT of Transformer Engine's layers, as Megatron's training code makes it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    layout(tp=run.tp)
    kind = MLATransformerConfig if run.model == "mla" else TransformerConfig
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 512,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "tensor_model_parallel_size": run.tp,
        "sequence_parallel": run.tp > 1,
        "gradient_accumulation_fusion": False,
        "fp8": "hybrid" if run.fp8 == "delayed" else "e4m3",
        "fp8_recipe": run.fp8,
        "fp8_param": True,
    }
    config = kind(**fields | LAYERS[run.model])
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.to(device)


def _built(run: Run, device: torch.device) -> tuple[list[Any], Any, dict[str, torch.Tensor]]:
    """(chunks, optimizer, values that the weights were quantized from)."""
    first: dict[str, torch.Tensor] = {}

    def remember(bare: Any) -> None:
        for name, weight in quantized(bare):
            value = weight.get_high_precision_init_val()
            require(value is not None, f"{name} has lost its first value")
            first[global_name(bare, name)] = value.clone()

    if device.type == "cpu":
        if run.model not in ALL_MODELS or not run.model.startswith("fp8"):
            raise NotPossible("needs layers of Transformer Engine")
        chunks, optimizer, _ = build(dataclasses.replace(run, remember=remember))
        return chunks, optimizer, first
    chunk = tiny_gpt.wrap_ddp(
        _model_of_te(run, device),
        overlap_grad_reduce=run.overlap,
        overlap_param_gather=run.overlap,
        bucket_size=100_000 if run.overlap else None,
        prepare=remember,
        fp8_param_gather=True,
        reuse_grad_buf_for_mxfp8_param_ag=run.fp8 == "mxfp8",
    )
    return [chunk], make_optimizer(run, [chunk]), first


def fp8_weights(
    device: torch.device,
    *,
    recipe: str,
    model: str = "fp8",
    steps: int = 4,
    overlap: bool = False,
) -> Figures:
    """Masters at start, codes of every step, and a save and resume of a recipe."""
    run = _run(recipe, model=model, overlap=overlap)
    chunks, optimizer, first = _built(run, device)
    require(bool(first), "no weight is quantized")
    whole = masters(chunks, optimizer)
    for bare, name, weight in weights_of(chunks):
        require(hasattr(weight, "tensor_model_parallel"), f"{name} has no TP attributes")
        kept = weight.get_high_precision_init_val()
        require(kept is None, f"{name} keeps its first value")
        key = global_name(bare, name)
        begins = torch.equal(cut(bare, name, weight, whole[key]), first[key].float().cpu())
        require(begins, f"the master of {name} does not begin with it")
    schedule = scheduler(optimizer, run)
    tiny_gpt.without_gather(chunks)
    losses = [_step(chunks, optimizer, schedule, run, step, device) for step in range(steps)]
    with tempfile.TemporaryDirectory() as mine:
        folder: list[Any] = [mine]
        dist.broadcast_object_list(folder)
        checkpointing.save(chunks, optimizer, schedule, Path(folder[0]) / "saved")
        stored = [_copied(delayed_scales(chunk)) for chunk in chunks]
        again = range(steps, steps + 2)
        straight = [_step(chunks, optimizer, schedule, run, step, device) for step in again]
        expected = codes(chunks)
        for chunk, scales in zip(chunks, stored, strict=True):
            for name, held in delayed_scales(chunk).items():
                for tensor, value in zip(held, scales[name], strict=True):
                    tensor.copy_(value)
        # Megatron adds the steps of a checkpoint to those of the scheduler.
        schedule = scheduler(optimizer, run)
        checkpointing.load(chunks, optimizer, schedule, Path(folder[0]) / "saved")
        if overlap:
            tiny_gpt.without_gather(chunks)
        resumed = [_step(chunks, optimizer, schedule, run, step, device) for step in again]
        found = codes(chunks)
        dist.barrier()
    require(straight == resumed, f"losses {straight} without, {resumed} after a resume")
    other = [name for name in expected if not torch.equal(expected[name], found[name])]
    require(not other, f"after a resume others are {', '.join(other[:3])}")
    return {
        "layout": f"TP{run.tp} DP{run.dp}",
        "steps": steps,
        "quantized": len(first),
        "losses": f"{losses[0]:.4f} to {losses[-1]:.4f}",
    }


def _copied(scales: dict[str, tuple[torch.Tensor, ...]]) -> dict[str, list[torch.Tensor]]:
    """What the stand-in keeps beside its weights; layers save and load theirs themselves."""
    return {name: [tensor.clone() for tensor in held] for name, held in scales.items()}


def _step(
    chunks: list[Any], optimizer: Any, schedule: Any, run: Run, step: int, device: torch.device
) -> float:
    """One step; codes must be those of the masters, on all replicas, and others than before."""
    before = codes(chunks)
    optimizer.zero_grad()
    batches = tiny_gpt.batch(
        step, global_batch=run.global_batch, micro_batch=run.global_batch // run.dp // 2
    )
    moved = [{key: value.to(device) for key, value in part.items()} for part in batches]
    loss = tiny_gpt.forward_backward(chunks, moved, optimizer)
    for chunk in chunks:
        update_delayed_scales(chunk)
    tiny_gpt.with_gather(chunks)
    require(optimizer.step()[0], f"step {step} was skipped")
    schedule.step(1)
    finish_gather(chunks, optimizer)
    wrong = wrong_codes(chunks, masters(chunks, optimizer))
    require(not wrong, f"step {step}: not of the masters: {', '.join(wrong[:3])}")
    unequal = unequal_replicas(chunks)
    require(not unequal, f"step {step}: replicas differ: {', '.join(unequal[:3])}")
    after = codes(chunks)
    data = [name for name in after if name.endswith("_data")]
    require(any(not torch.equal(after[n], before[n]) for n in data), f"step {step} changed no code")
    return loss


def saves(device: torch.device) -> Figures:
    """Saves at once and asynchronous, each loaded with and without streamed dequantization."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8

    run, kind = _run("blockwise"), "fully_reshardable"
    [chunk], optimizer, _ = _built(run, device)
    schedule = scheduler(optimizer, run)
    _step([chunk], optimizer, schedule, run, 0, device)
    expected = codes([chunk]) | masters([chunk], optimizer)

    def content(*, is_loading: bool) -> dict[str, Any]:
        return checkpointing.content([chunk], optimizer, schedule, is_loading=is_loading, kind=kind)

    with tempfile.TemporaryDirectory() as mine:
        folder: list[Any] = [mine]
        dist.broadcast_object_list(folder)
        for is_async in (False, True):
            path = Path(folder[0]) / str(is_async)
            path.mkdir(exist_ok=True)
            stored = content(is_loading=False)
            if device.type == "cpu":
                force_all_tensors_to_non_fp8(stored)
            request = dist_checkpointing.save(
                stored, str(path), async_sharded_save=is_async, async_strategy="mcore"
            )
            if request is not None:
                request.execute_sync()
            for is_streamed in (False, True):
                _spoil(chunk, optimizer)
                loaded = dist_checkpointing.load(
                    content(is_loading=True),
                    str(path),
                    TorchDistLoadShardedStrategy(stream_ckpt_dequant=is_streamed),
                )
                chunk.module.load_state_dict(loaded["model"], strict=False)
                optimizer.load_state_dict(loaded["optimizer"])
                found = codes([chunk]) | masters([chunk], optimizer)
                other = [n for n, value in expected.items() if not torch.equal(value, found[n])]
                words = f"asynchronous {is_async}, streamed {is_streamed}"
                require(not other, f"{words}: others are {', '.join(other[:3])}")
        dist.barrier()
    return {"tensors": len(expected)}


def _spoil(chunk: Any, optimizer: Any) -> None:
    """Make all codes and masters wrong, so that what is right has come from a checkpoint."""
    for _, _, weight in weights_of([chunk]):
        for tensor in tensors_of(weight).values():
            tensor.fill_(7)
    for child in optimizer.chained_optimizers:
        for main in child.get_parameters():
            main.data.fill_(float("nan"))


def step_times(device: torch.device) -> Figures:
    """Time of an optimizer step, and memory, of AdamW, megatron-core's muon, and ours."""
    layout(tp=1)
    found: Figures = {}
    for contender in contenders():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        wrapped, optimizer = contender.build(SIZES[device.type], device)
        milliseconds = median_ms(lambda o=optimizer, w=wrapped: _optimize(o, w), device, 3)
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
        found[contender.label] = f"{milliseconds:.1f} ms, {peak:.1f} GiB"
        del wrapped, optimizer
    return found


def _optimize(optimizer: Any, wrapped: Any) -> None:
    for buffer in wrapped.buffers:
        buffer.grad_data.fill_(1e-3)
    optimizer.step()


def split_matrices(device: torch.device) -> Figures:
    """A step of one matrix that all ranks share, against one owner."""
    if dist.get_world_size() == 1:
        raise NotPossible("needs several ranks")
    layout(tp=1)
    rules = (
        Rule(pattern="*", optimizer="adam"),
        Rule(pattern="*.0.mlp.linear_fc2.weight", optimizer="matrix"),
    )
    one = MatrixConfig(compute_dtype="fp32", split_ranks=1, rules=rules)
    several = dataclasses.replace(one, split_ranks=dist.get_world_size(), split_min_gflop=0.0)
    weights = []
    for config in (one, several):
        contender = Contender(key="dmuon", label="dmuon", matrix=config)
        wrapped, optimizer = contender.build(SIZES[device.type], device)
        generator = torch.Generator(device=device).manual_seed(2)
        for buffer in wrapped.buffers:
            buffer.grad_data.normal_(generator=generator)
        before = [p.detach().clone() for p in wrapped.parameters()]
        optimizer.step()
        plan = optimizer.chained_optimizers[0].plan
        split = sum(len(scheme.ranks) > 1 for scheme in plan.schemes)
        weights.append([p.detach() - b for p, b in zip(wrapped.parameters(), before, strict=True)])
    require(split > 0, "no matrix was split")
    worst = max(
        float((alone - shared).norm() / alone.norm())
        for alone, shared in zip(*weights, strict=True)
    )
    require(worst < 1e-4, f"updates are {worst:.1e} apart")
    return {"split": split, "apart": f"{worst:.0e}", "lr": LR}
