"""Run a function on several ranks: forked processes of one machine, joined over gloo.

The parent has imported torch and megatron already, so that starting ranks costs a fork each.
Whatever happens in a rank, ``run_ranks`` returns or raises within its timeout and leaves neither
process nor file behind.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

import torch
import torch.distributed as dist

# After a failure, how long the other ranks may take to report theirs: often the same one.
_GRACE_SECONDS = 0.5
_STACKS_SECONDS = 1.0


class RankFailed(RuntimeError):
    """At least one rank raised or died.

    Attributes:
        reports: for each rank that failed, its traceback or how it ended.
    """

    def __init__(self, reports: dict[int, str], headline: str) -> None:
        # Both, so that a process pool can pass it on.
        super().__init__(reports, headline)
        self.reports = reports
        self.headline = headline

    def __str__(self) -> str:
        reports = (f"--- rank {rank} ---\n{self.reports[rank]}" for rank in sorted(self.reports))
        return "\n".join((self.headline, *reports))


class RanksTimedOut(RankFailed):
    """The ranks did not finish in time; the reports are the Python stacks of those still alive."""


# Before the pickled outcome; its end cannot be told by the end of the stream, since processes that
# a rank forks, such as Megatron's checkpoint queue, keep the stream open.
_LENGTH = struct.Struct("!Q")


@dataclass
class _Rank:
    pid: int
    death: int
    results: int
    release: int
    stacks: IO[bytes]
    received: bytearray = field(default_factory=bytearray, repr=False)

    def read(self) -> None:
        """Take what has arrived, without waiting for more."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.results, 1 << 20):
                self.received += chunk

    def outcome(self) -> bytes | None:
        """The pickled outcome, once it is complete."""
        start = _LENGTH.size
        if len(self.received) < start:
            return None
        [length] = _LENGTH.unpack(self.received[:start])
        return bytes(self.received[start:]) if len(self.received) == start + length else None

    def end(self) -> None:
        """Kill the rank and all its descendants."""
        # Its group exists only once the child has made it; the child itself until it is reaped.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for descriptor in (self.death, self.results, self.release):
            os.close(descriptor)
        self.stacks.close()


def run_ranks[T](
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 120,
    init_process_group: bool = True,
    **kwargs: Any,
) -> list[T]:
    """Call ``fn(rank, *args, **kwargs)`` in ``world_size`` processes at once.

    ``fn`` may be a closure; what it returns is pickled, tensors by value.

    Args:
        world_size: number of ranks.
        fn: function to call in each rank.
        *args: passed on to ``fn`` after the rank.
        timeout: seconds for everything.
        init_process_group: whether the ranks join the default process group before the call.
        **kwargs: passed on to ``fn``.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        RankFailed: a rank raised or died; the others were killed.
        RanksTimedOut: the ranks were still running at the end of the timeout.
    """
    # Bound here and served by rank 0: no other process can take the port in between.
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4 * world_size)

    # A name in this frame, which a rank never leaves: rank 0's store serves to the end.
    stores: list[dist.Store] = []

    def body(rank: int) -> T:
        stores.append(_join(rank, world_size, listener, timeout, init_process_group))
        return fn(rank, *args, **kwargs)

    ranks: list[_Rank] = []
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(world_size):
            ranks.append(_fork(rank, body, [other.release for other in ranks]))
        outcomes = _collect(ranks, time.monotonic() + timeout, timeout)
    finally:
        listener.close()
        for process in ranks:
            process.end()
    return outcomes


def layout(
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    *,
    ep: int = 1,
    etp: int | None = None,
    vpp: int | None = None,
    optimizer_instances: int = 1,
    seed: int = 1234,
    **options: Any,
) -> None:
    """Create Megatron's process groups, once per rank; the remaining size is data parallel.

    Args:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        ep: expert-parallel size.
        etp: expert-tensor-parallel size, ``tp`` by default.
        vpp: virtual pipeline stages per rank.
        optimizer_instances: replicas of the distributed optimizer.
        seed: of Megatron's random number trackers.
        **options: more arguments of ``initialize_model_parallel``.
    """
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_distributed_optimizer_instances=optimizer_instances,
        **options,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _join(
    rank: int, world_size: int, listener: socket.socket, timeout: float, process_group: bool
) -> dist.Store:
    """Set the environment of a rank and join the others; the store must outlive the rank's work."""
    host, port = listener.getsockname()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # Who joins by the environment, as pretrain() does, is a client: the store exists already.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        # The machine's own name need not resolve.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    if rank == 0:
        served = listener.detach()
    else:
        served = None
        listener.close()
    store = dist.TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=served,
    )
    if process_group:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
    return store


def _fork(rank: int, body: Callable[[int], Any], inherited: list[int]) -> _Rank:
    results, report = os.pipe()
    awaited, release = os.pipe()
    # Has no name, so nothing is left of it.
    stacks = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the rank
    # What the parent has is nothing that a rank's collector must look at: looking writes, and
    # every page of it would be copied.
    gc.freeze()
    with warnings.catch_warnings():
        # Any thread in the parent draws this warning; ours hold no lock that a rank needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        gc.unfreeze()
        os.close(report)
        os.close(awaited)
        os.set_blocking(results, False)
        return _Rank(pid, os.pidfd_open(pid), results, release, stacks)

    # From here on the child, which never returns into the caller's test session.
    try:
        os.setpgid(0, 0)
        # The ends by which the parent holds back other ranks: a copy would hold them for ever.
        for descriptor in (*inherited, results, release):
            os.close(descriptor)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            outcome = pickle.dumps((True, body(rank)))
        except BaseException:
            outcome = pickle.dumps((False, traceback.format_exc()))
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        with os.fdopen(report, "wb") as stream:
            stream.write(_LENGTH.pack(len(outcome)) + outcome)
        # Stay until all have reported: rank 0 serves the store, and an exit resets connections.
        os.read(awaited, 1)
    finally:
        os._exit(1)


def _collect(ranks: list[_Rank], deadline: float, timeout: float) -> list[Any]:
    outcomes: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(enumerate(ranks))
    while waiting:
        watched = {process.results: rank for rank, process in waiting.items()}
        watched |= {process.death: rank for rank, process in waiting.items()}
        ready, _, _ = select.select(list(watched), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in {watched[descriptor] for descriptor in ready}:
            dead = ranks[rank].death in ready
            ranks[rank].read()
            pickled = ranks[rank].outcome()
            if pickled is None and not dead:
                continue
            del waiting[rank]
            succeeded, value = (
                (False, _obituary(ranks[rank])) if pickled is None else pickle.loads(pickled)
            )
            if succeeded:
                outcomes[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failures:
        raise RankFailed(failures, f"{len(failures)} of {len(ranks)} ranks failed.")
    if waiting:
        stacks = _stacks(waiting)
        raise RanksTimedOut(
            stacks, f"Ranks {sorted(stacks)} were still running after {timeout:g} seconds."
        )
    return [outcomes[rank] for rank in range(len(ranks))]


def _obituary(process: _Rank) -> str:
    # Left to be reaped, so that its number, by which its group is killed, stays its own.
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    cause = "exit status" if ended.si_code == os.CLD_EXITED else "signal"
    return f"died without a report: {cause} {ended.si_status}"


def _stacks(processes: dict[int, _Rank]) -> dict[int, str]:
    for process in processes.values():
        os.kill(process.pid, signal.SIGUSR1)
    # A rank that is inside a collective is interrupted at once; a swamped machine is not so quick.
    end = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < end and not all(
        os.fstat(process.stacks.fileno()).st_size for process in processes.values()
    ):
        time.sleep(0.05)
    time.sleep(0.1)
    reports = {}
    for rank, process in processes.items():
        process.stacks.seek(0)
        reports[rank] = process.stacks.read().decode(errors="replace") or "(no stack)"
    return reports
