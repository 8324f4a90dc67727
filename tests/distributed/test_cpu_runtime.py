"""Unmodified Megatron on CPU: one model, any layout, the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_gpt
from tests.ranks import RankFailed, RanksTimedOut, layout

pytestmark = pytest.mark.usefixtures("megatron")

RunRanks = Callable[..., list[Any]]
Trained = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], int]

STEPS = 4


def train(
    rank: int,
    tp: int = 1,
    pp: int = 1,
    *,
    sequence_parallel: bool = False,
    ddp: dict[str, Any] | None = None,
    layout_options: dict[str, Any] | None = None,
    **gpt: Any,
) -> Trained:
    """Losses, gradients of step 0, parameters after the last step, number of buckets."""
    layout(tp, pp, **(layout_options or {}))
    model = tiny_gpt.wrap_ddp(
        tiny_gpt.build_gpt(sequence_parallel=sequence_parallel, **gpt), **(ddp or {})
    )
    tiny_gpt.forward_backward(model, tiny_gpt.batch(0))
    gradients = tiny_gpt.gather_full(model, "main_grad")
    optimizer = tiny_gpt.adam(model)
    losses = [tiny_gpt.train_step(model, optimizer, step) for step in range(STEPS)]
    buckets = sum(len(buffer.buckets) for buffer in model.buffers)
    return losses, gradients, tiny_gpt.gather_full(model), buckets


@pytest.fixture(scope="module")
def one_process(ranks: RunRanks) -> Trained:
    [trained] = ranks(1, train)
    return trained


@pytest.fixture(scope="module")
def one_process_bf16(ranks: RunRanks) -> Trained:
    [trained] = ranks(1, train, params_dtype=torch.bfloat16)
    return trained


def assert_same_values(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    for name, value in actual.items():
        torch.testing.assert_close(
            value, expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "dp2": (2, {}),
    "dp2-overlap": (2, {"ddp": OVERLAP}),
    "dp2-plain": (2, {"ddp": {"use_distributed_optimizer": False}}),
    "tp2-dp2": (4, {"tp": 2}),
    "tp2-dp2-overlap": (4, {"tp": 2, "ddp": OVERLAP}),
    "tp2-dp2-sp-overlap": (4, {"tp": 2, "sequence_parallel": True, "ddp": OVERLAP}),
    "pp2": (2, {"pp": 2}),
    "pp2-tp2-sp-overlap": (4, {"tp": 2, "pp": 2, "sequence_parallel": True, "ddp": OVERLAP}),
    "dp4-instances2-overlap": (
        4,
        {
            "ddp": OVERLAP | {"num_distributed_optimizer_instances": 2},
            "layout_options": {"optimizer_instances": 2},
        },
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_trains_as_one_process(
    ranks: RunRanks, one_process: Trained, case: str
) -> None:
    world_size, options = LAYOUTS[case]
    losses, gradients, params, _ = one_process
    for trained in ranks(world_size, train, **options):
        assert trained[0] == pytest.approx(losses, abs=5e-6)
        assert_same_values(trained[1], gradients, 1e-6)
        # Adam divides by the root of a tiny second moment, which magnifies rounding.
        assert_same_values(trained[2], params, 1e-4)


@pytest.mark.parametrize("case", ["tp2-sp", "dp2-overlap", "tp2-dp2-sp-overlap"])
def test_bf16_parameters_train_alike(ranks: RunRanks, one_process_bf16: Trained, case: str) -> None:
    world_size, options = LAYOUTS[case]
    losses, gradients, _, _ = one_process_bf16
    for trained in ranks(world_size, train, params_dtype=torch.bfloat16, **options):
        assert all(p.dtype == torch.bfloat16 for p in trained[2].values())
        assert trained[0] == pytest.approx(losses, abs=0.05)
        assert_same_values(trained[1], gradients, 0.02)


def test_all_stages_together_hold_every_parameter_once(
    ranks: RunRanks, one_process: Trained
) -> None:
    first, last = ranks(2, train, pp=2)
    assert sorted([*first[2], *last[2]]) == sorted(one_process[2])


def test_overlap_uses_several_buckets(ranks: RunRanks) -> None:
    trained = ranks(2, train, ddp=OVERLAP)
    assert trained[0][3] > 2


def test_whole_gate_comes_before_whole_up(ranks: RunRanks) -> None:
    def fc1(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        layout(tp=2)
        model = tiny_gpt.build_gpt()
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        return model.get_parameter(name).detach(), tiny_gpt.gather_full(model)[name]

    (stored0, whole), (stored1, _) = ranks(2, fc1)
    gate0, up0 = stored0.chunk(2)
    gate1, up1 = stored1.chunk(2)
    assert torch.equal(whole, torch.cat([gate0, gate1, up0, up1]))


def test_experts_train_alike_under_expert_parallelism(ranks: RunRanks) -> None:
    moe: dict[str, Any] = {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    }
    [(losses, gradients, _, _)] = ranks(1, train, **moe)
    held = ranks(2, train, layout_options={"ep": 2}, **moe)
    for trained in held:
        assert trained[0] == pytest.approx(losses, abs=5e-6)
        assert_same_values(trained[1], gradients, 1e-6)
    assert {*held[0][1], *held[1][1]} == set(gradients)
    assert set(held[0][1]) != set(held[1][1])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_adamw_value_by_value(weight_decay: float) -> None:
    from megatron.core.optimizer import Adam

    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((7, 5), (3,), (4, 4))]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    options = {"lr": 3e-3, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": weight_decay}
    adam = Adam(ours, **options)
    adamw = torch.optim.AdamW(theirs, foreach=False, **options)
    for step in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        # No gradient, no update, not even a weight decay; this parameter's own step lags behind
        # in torch alone, so it gets none to the end.
        ours[2].grad = theirs[2].grad = None
        adam.step()
        adamw.step()
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other), f"step {step}"
    assert adam.param_groups[0]["step"] == 5
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert set(adam.state[mine]) == {"exp_avg", "exp_avg_sq"}
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(adam.state[mine][key], adamw.state[other][key])


def test_adam_with_coupled_weight_decay_is_adam() -> None:
    from megatron.core.optimizer import Adam

    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    adam = Adam([ours], lr=1e-2, weight_decay=0.1, adam_w_mode=False)
    torch_adam = torch.optim.Adam([theirs], lr=1e-2, weight_decay=0.1, foreach=False)
    for _ in range(3):
        ours.grad = theirs.grad = torch.full((9,), 0.3)
        adam.step()
        torch_adam.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("async_op", [False, True])
def test_all_gather_of_uneven_pieces(ranks: RunRanks, async_op: bool) -> None:
    def gather(rank: int) -> list[list[int]]:
        pieces = [torch.empty(size, dtype=torch.int64) for size in (3, 0, 2)]
        mine = torch.arange(pieces[rank].numel()) + 10 * rank
        work = torch.distributed.all_gather(pieces, mine, async_op=async_op)
        if async_op:
            work.wait()
        return [piece.tolist() for piece in pieces]

    for gathered in ranks(3, gather):
        assert gathered == [[0, 1, 2], [], [20, 21]]


@pytest.mark.parametrize("async_ops", [False, True])
def test_coalesced_gather_of_mixed_dtypes(ranks: RunRanks, async_ops: bool) -> None:
    def gather(rank: int) -> list[torch.Tensor]:
        from torch.distributed import _coalescing_manager

        parts = [
            torch.full((5,), 100 + rank, dtype=torch.uint8),
            torch.full((3,), 0.5 + rank, dtype=torch.bfloat16),
        ]
        wholes = [torch.zeros(2 * part.numel(), dtype=part.dtype) for part in parts]
        group = torch.distributed.group.WORLD
        with _coalescing_manager(group, async_ops=async_ops) as handle:
            for whole, part in zip(wholes, parts, strict=True):
                torch.distributed.all_gather_into_tensor(
                    whole, part, group=group, async_op=async_ops
                )
        if async_ops:
            handle.wait()
        return wholes

    for codes, values in ranks(2, gather):
        assert codes.tolist() == [100] * 5 + [101] * 5
        assert values.tolist() == [0.5] * 3 + [1.5] * 3


def test_coalesced_reductions_keep_their_operator(ranks: RunRanks) -> None:
    def reduce(rank: int) -> tuple[list[float], list[float]]:
        from torch.distributed import ReduceOp, _coalescing_manager

        whole, part = torch.tensor([1.0, 2.0]) * (rank + 1), torch.zeros(1)
        highest = torch.tensor([float(rank)])
        group = torch.distributed.group.WORLD
        with _coalescing_manager(group):
            torch.distributed.reduce_scatter_tensor(part, whole, op=ReduceOp.AVG, group=group)
        with _coalescing_manager(group):
            torch.distributed.all_reduce(highest, op=ReduceOp.MAX, group=group)
        return part.tolist(), highest.tolist()

    assert ranks(2, reduce) == [([1.5], [1.0]), ([3.0], [1.0])]


def test_float8_and_tensor_split_sizes_are_communicated(ranks: RunRanks) -> None:
    def exchange(rank: int) -> tuple[list[float], list[float]]:
        codes = torch.tensor([1.0 + rank, 2.0]).to(torch.float8_e4m3fn)
        everyone = torch.empty(4, dtype=torch.float8_e4m3fn)
        torch.distributed.all_gather_into_tensor(everyone, codes)
        sizes = torch.tensor([1, 2])
        received = torch.empty(int(sizes[rank]) * 2)
        torch.distributed.all_to_all_single(
            received, torch.arange(3.0) + 10 * rank, [int(sizes[rank])] * 2, sizes
        )
        return everyone.float().tolist(), received.tolist()

    assert ranks(2, exchange) == [
        ([1.0, 2.0, 2.0, 2.0], [0.0, 10.0]),
        ([1.0, 2.0, 2.0, 2.0], [1.0, 2.0, 11.0, 12.0]),
    ]


def test_a_sent_buffer_may_be_overwritten_at_once(ranks: RunRanks) -> None:
    def send(rank: int) -> float:
        buffer = torch.full((1 << 16,), 1.0)
        if rank == 0:
            work = torch.distributed.isend(buffer, 1)
            buffer.zero_()
        else:
            time.sleep(0.2)
            work = torch.distributed.irecv(buffer.zero_(), 0)
        work.wait()
        return float(buffer.sum())

    assert ranks(2, send)[1] == 1 << 16


def test_cuda_tensors_and_queries_are_the_cpus() -> None:
    device = torch.cuda.current_device()
    made = [
        torch.zeros(2, device="cuda"),
        torch.empty(2, device=device, pin_memory=True),
        torch.tensor([1], device=torch.device("cuda", 0)),
        torch.ones(2).new_zeros(3, device="cuda:0"),
        torch.ones(2).to("cuda").to(device).cuda().pin_memory(),
        torch.nn.Linear(2, 2).cuda().to("cuda").weight,
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    with torch.device("meta"):
        assert torch.empty(2).is_meta
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
    assert torch.cuda.current_stream() is torch.cuda.default_stream()


def test_the_rng_tracker_forks_the_cpu_generator(ranks: RunRanks) -> None:
    def draw(rank: int) -> tuple[bool, float]:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        layout(tp=2)
        before = torch.get_rng_state()
        with get_cuda_rng_tracker().fork():
            drawn = float(torch.rand((), device="cuda"))
        return torch.equal(before, torch.get_rng_state()), drawn

    (restored0, drawn0), (restored1, drawn1) = ranks(2, draw)
    assert restored0 and restored1
    assert drawn0 != drawn1


def test_the_rest_of_apex_stays_absent() -> None:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.optimizer import distrib_optimizer

    assert distrib_optimizer.USING_APEX_OPTIMIZER
    assert not gpt_layer_specs.HAVE_APEX
    with pytest.raises(ModuleNotFoundError):
        import apex  # noqa: F401


def in_fresh_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )


def test_enable_refuses_once_megatron_is_imported() -> None:
    done = in_fresh_process(
        "import sys, types\n"
        "sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "from megatron_muon import cpu\n"
        "cpu.enable()\n"
    )
    assert done.returncode != 0
    assert "before the first import of megatron" in done.stderr


def test_enable_is_quiet_and_may_be_repeated() -> None:
    done = in_fresh_process(
        "from megatron_muon import cpu\n"
        "assert not cpu.is_enabled()\n"
        "cpu.enable()\n"
        "cpu.enable()\n"
        "assert cpu.is_enabled()\n"
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_failing_rank_is_reported_at_once(ranks: RunRanks) -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank one is wrong")
        time.sleep(100)

    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank one is wrong") as caught:
        ranks(3, fail)
    assert list(caught.value.reports) == [1]
    assert time.monotonic() - start < 20


def test_a_dying_rank_is_reported(ranks: RunRanks) -> None:
    with pytest.raises(RankFailed, match="exit status 7"):
        ranks(2, lambda rank: os._exit(7) if rank == 0 else time.sleep(100))


def test_a_hang_is_reported_with_stacks(ranks: RunRanks) -> None:
    def wait_forever(rank: int) -> None:
        if rank == 0:
            torch.distributed.barrier()

    with pytest.raises(RanksTimedOut, match="wait_forever") as caught:
        ranks(2, wait_forever, timeout=3)
    assert list(caught.value.reports) == [0]


def test_ranks_leave_nothing_behind(ranks: RunRanks) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    results = ranks(2, lambda rank: {"tensor": torch.full((3,), float(rank))})
    assert [r["tensor"].tolist() for r in results] == [[0.0] * 3, [1.0] * 3]
    with pytest.raises(RankFailed):
        ranks(2, lambda rank: 1 / rank)
    assert open_files() == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
