"""Reports the work of one pipeline stage of a command as plain data, in one process per stage."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from megatron_muon.dry_run.quantized import buffer_bytes
from megatron_muon.dry_run.script import Built, build
from megatron_muon.dry_run.step import StepCounts, count_step
from megatron_muon.dry_run.upstream import MODES, upstream_load
from megatron_muon.integration.support import ConfigurationError

MASTER_BYTES, ADAM_BYTES = 4, 8
"""Bytes per element on the rank that stores it; fp32 weights are their own masters."""

_MAX_OUTPUT = 4000


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """The result of a stage's process.

    Attributes:
        report: The stage as plain data; None if it was refused or failed.
        summaries: Its parts of the start-up table.
        settings: Settings of the matrix optimizer.
        flags_set: Flags that were set for the dry run.
        stand_ins: What stands in for Transformer Engine, one sentence each.
        pipeline: The corresponding ranks in every stage.
        experts: The corresponding ranks of this stage with other experts.
        problems: Errors of a refusal.
        checks: Rounds of collective checks before the refusal.
        unmatched: Patterns of rules that match nothing here.
        failure: (exit code, output) of a script that ended otherwise.
    """

    report: dict[str, Any] | None = None
    summaries: tuple[Any, ...] = ()
    settings: Any = None
    flags_set: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    pipeline: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    checks: int = 0
    unmatched: frozenset[str] = frozenset()
    failure: tuple[int, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A rank to run.

    Attributes:
        command: The script and its arguments.
        world_size: Number of ranks.
        ranks_per_node: Ranks on one node.
        rank: The rank.
        capability: Compute capability of the GPUs.
        unmatched: Patterns of rules that match nothing in any stage.
        only_rules: True to stop when the rules without a match are known.
    """

    command: tuple[str, ...]
    world_size: int
    ranks_per_node: int
    rank: int
    capability: tuple[int, int]
    unmatched: frozenset[str] = frozenset()
    only_rules: bool = False


def run_stages(jobs: Sequence[Job]) -> Iterator[StageResult]:
    """Yield the results of jobs in order, with as many in parallel as there are cores.

    Call it in a process that has imported Megatron, from which the processes are forked.
    """
    fork = multiprocessing.get_context("fork")
    parallel = os.cpu_count() or 1
    for first in range(0, len(jobs), parallel):
        started = []
        for job in jobs[first : first + parallel]:
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=_run, args=(job, sender))
            process.start()
            sender.close()
            started.append((process, receiver))
        for process, receiver in started:
            try:
                yield receiver.recv()
            except EOFError:
                process.join()
                yield StageResult(failure=(1, f"its process ended with {process.exitcode}"))
            process.join()


def _run(job: Job, sender: Connection) -> None:
    with tempfile.TemporaryFile("w+") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        result = _result(job)
        if result.failure is not None:
            output.flush()
            output.seek(0)
            code, text = result.failure
            result = replace(result, failure=(code, (output.read() + text)[-_MAX_OUTPUT:]))
        sender.send(result)
    # Exit handlers of the script are meant for a real run.
    os._exit(0)


def _result(job: Job) -> StageResult:
    checks = _Checks(job)
    try:
        checks.install()
        built = build(
            job.command,
            world_size=job.world_size,
            rank=job.rank,
            ranks_per_node=job.ranks_per_node,
            capability=job.capability,
        )
        result = StageResult(
            report=stage_report(built, job),
            summaries=tuple(checks.summaries),
            settings=checks.settings,
            flags_set=built.replaced,
            stand_ins=built.stand_ins,
        )
    except ConfigurationError as error:
        result = StageResult(problems=error.problems, checks=checks.count)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        return StageResult(failure=(code, "" if error.code == code else f"{error.code}\n"))
    except BaseException:
        return StageResult(failure=(1, traceback.format_exc()))
    return replace(
        result,
        pipeline=_corresponding_ranks("pipeline_model_parallel"),
        experts=_corresponding_ranks("expert_model_parallel"),
        unmatched=frozenset(checks.unmatched),
    )


class _Checks:
    """Records the builder's collective checks, as the stages run separately."""

    def __init__(self, job: Job) -> None:
        self.count = 0
        self.unmatched: set[str] = set()
        self.summaries: list[Any] = []
        self.settings: Any = None
        self._job = job

    def install(self) -> None:
        builder: Any = importlib.import_module("megatron_muon.integration.builder")
        from megatron_muon.matrices import unmatched_rules

        check, summarize = builder._raise_on_every_rank, builder.summarize

        def counted(problems: Any, rules: Any = (), names: Any = ()) -> None:
            self.count += 1
            self.unmatched |= set(unmatched_rules(rules, names))
            if self._job.only_rules and names:
                raise ConfigurationError([])
            check(problems, [r for r in rules if r.pattern in self._job.unmatched], names)

        def recorded(settings: Any, *args: Any, **kwargs: Any) -> Any:
            self.settings = settings
            self.summaries.append(summarize(settings, *args, **kwargs))
            return self.summaries[-1]

        builder._raise_on_every_rank, builder.summarize = counted, recorded


def _corresponding_ranks(group: str) -> tuple[int, ...]:
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        return ()
    found = getattr(parallel_state, f"get_{group}_group")()
    return tuple(torch.distributed.get_process_group_ranks(found))


def stage_report(built: Built, job: Job) -> dict[str, Any]:
    """Return one stage as plain data, with the keys of ``--json``."""
    args = built.args
    groups = [
        _group_report(built, optimizer, job.ranks_per_node)
        for optimizer in built.optimizer.chained_optimizers
        if getattr(optimizer, "plan", None) is not None
    ]
    return {
        "rank": job.rank,
        "tokens": args.global_batch_size * args.seq_length,
        "active_experts": args.moe_router_topk / args.num_experts if args.num_experts else 0.0,
        "output_elements": args.padded_vocab_size * args.hidden_size,
        "pipeline_size": args.pipeline_model_parallel_size,
        "overlaps_gather": bool(args.overlap_param_gather),
        "groups": groups,
    }


def _group_report(built: Built, optimizer: Any, ranks_per_node: int) -> dict[str, Any]:
    plan, domain = optimizer.plan, optimizer.setup.domain
    members = torch.distributed.get_process_group_ranks(optimizer.setup.exchange_group)
    loads, size = plan.loads, plan.group.size
    counted: dict[int, StepCounts] = {}

    def count(rank: int) -> StepCounts:
        if rank not in counted:
            with built.mode:
                counted[rank] = count_step(plan, optimizer.rule, rank, optimizer.setup.device)
        return counted[rank]

    held, adam = _elements(built, plan, domain)
    factors = [0] * size
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        if (rank := optimizer.rule.rank(*matrix.shape)) is not None:
            factors[owner] += min(matrix.shape) * rank * optimizer.rule.state_dtype.itemsize
    buffers = [b for chunk in built.model_chunks for b in domain.buffers(chunk)]
    in_buffers = buffer_bytes(buffers)
    master = MASTER_BYTES if any(b.param_dtype.itemsize < 4 for b in buffers) else 0
    momentum = optimizer.rule.momentum_dtype.itemsize
    state = [
        held[r // plan.group.tp] * (master + momentum)
        + adam[r // plan.group.tp] * (master + ADAM_BYTES)
        + factors[r]
        for r in range(size)
    ]
    fullest = max(range(size), key=lambda r: state[r] + loads[r].peak_buffer_bytes)
    sender = max(range(size), key=lambda r: loads[r].sent_bytes)
    busiest = max(range(size), key=lambda r: loads[r].flops)
    dp_rank = fullest // plan.group.tp
    node = members[sender] // ranks_per_node
    sent, most, full = count(sender), count(busiest), count(fullest)
    planned = loads[fullest].peak_buffer_bytes
    reached, bound = plan.balance
    flops = [load.flops for load in loads]
    return {
        "domain": domain.name,
        "tp": plan.group.tp,
        "dp": plan.group.dp,
        "groups_in_stage": built.args.world_size // built.args.pipeline_model_parallel_size // size,
        "matrices": len(plan.matrices),
        "elements": sum(m.numel for m in plan.matrices),
        "owners": sum(f > 0 for f in flops),
        "split_matrices": sum(len(s.ranks) > 1 for s in plan.schemes),
        "by_factors": sum(not s.assembles for s in plan.schemes),
        "waves": len(plan.main.waves) + len(plan.split.waves),
        "flops_max": max(flops),
        "flops_mean": sum(flops) / size,
        "flops_of_ranks": flops,
        "largest_matrix_flops": max(plan.flops, default=0),
        "balance": reached,
        "balance_bound": bound,
        "sent_bytes": loads[sender].sent_bytes,
        "dmuon_sent_bytes": max(plan.whole_matrix_bytes()),
        "sent_bytes_in_node": sum(
            n for r, n in sent.sent.items() if members[r] // ranks_per_node == node
        ),
        "sent_bytes_over_network": sum(
            n for r, n in sent.sent.items() if members[r] // ranks_per_node != node
        ),
        "peers": len(sent.sent),
        "messages": max(c.messages for c in counted.values()),
        "launches": max(c.launches for c in counted.values()),
        "host_reads": max(c.host_reads for c in counted.values()),
        "dp_ranks_on_a_node": min(plan.group.dp, max(1, plan.ranks_per_node // plan.group.tp)),
        "held_elements": max(held),
        "adam_elements": max(adam),
        "gathered_bytes": in_buffers["gathered"],
        "memory": {
            "rank": members[fullest],
            "weights": in_buffers["weights"],
            "gradients": in_buffers["gradients"],
            "masters": (held[dp_rank] + adam[dp_rank]) * master,
            "momentum": held[dp_rank] * momentum,
            "adam_moments": adam[dp_rank] * ADAM_BYTES,
            "right_factors": factors[fullest],
            "step": full.transient_bytes,
            "step_planned": planned,
        },
        "memory_of_ranks": [x + loads[r].peak_buffer_bytes for r, x in enumerate(state)],
        "counted_against_plan": {
            "sent_bytes": sent.sent_bytes - loads[sender].sent_bytes,
            # QR is included in the plan, but not counted.
            "flops_percent": None
            if any(scheme.factors for scheme in plan.schemes)
            else 100 * (most.flops / max(1, loads[busiest].flops) - 1),
            "memory_percent": 100 * (full.transient_bytes / max(1, planned) - 1),
        },
        "upstream": {mode: upstream_load(built, plan, domain, mode) for mode in MODES},
    }


def _elements(built: Built, plan: Any, domain: Any) -> tuple[list[int], list[int]]:
    """Return the elements of matrices, and of Adam's parameters, on every DP rank."""
    dp = plan.group.dp
    held, adam = [0] * dp, [0] * dp
    for parameter in plan.parameters:
        for rank, (start, stop) in enumerate(parameter.ranges):
            held[rank] += stop - start
    for chunk in built.model_chunks:
        for buffer in domain.buffers(chunk):
            for start, stop, number in buffer.param_index_map.values():
                bucket = buffer.buckets[number]
                shard = bucket.grad_data.numel() // dp
                for rank in range(
                    (start - bucket.offset) // shard, -(-(stop - bucket.offset) // shard)
                ):
                    low = bucket.offset + rank * shard
                    adam[rank] += min(stop, low + shard) - max(start, low)
    return held, [both - matrices for both, matrices in zip(adam, held, strict=True)]
