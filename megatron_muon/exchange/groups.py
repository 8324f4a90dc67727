"""Exchange groups: the TP x DP ranks among which the matrices of one stage travel."""

from __future__ import annotations

from itertools import groupby

import torch.distributed as dist

from megatron_muon.exchange.transport import gather_objects


def neighbours_on_a_node(
    *, tp_group: dist.ProcessGroup, dp_group: dist.ProcessGroup, ranks_per_node: int
) -> int:
    """How many ranks of an exchange group, one after another, are on one node.

    Args:
        tp_group: As for ``exchange_group``.
        dp_group: As for ``exchange_group``.
        ranks_per_node: Ranks of the world on every node.

    Returns:
        Their number; that of all where it differs from node to node. The same on every rank.
    """
    members = _members(tp_group, dp_group)
    runs = [len(list(run)) for _, run in groupby(rank // ranks_per_node for rank in members)]
    first, last = runs[0], runs[-1]
    is_regular = set(runs[:-1]) <= {first} and last <= first
    return first if is_regular else len(members)


def _members(tp_group: dist.ProcessGroup, dp_group: dist.ProcessGroup) -> list[int]:
    """Ranks of the world in the exchange group: a step along an axis is the same everywhere."""
    here = dist.get_rank()
    return [
        by_dp + by_tp - here
        for by_dp in dist.get_process_group_ranks(dp_group)
        for by_tp in dist.get_process_group_ranks(tp_group)
    ]


def exchange_group(
    *,
    tp_group: dist.ProcessGroup,
    dp_group: dist.ProcessGroup,
    existing: dist.ProcessGroup | None = None,
) -> dist.ProcessGroup:
    """The group of all TP neighbours of all DP neighbours, TP neighbours adjacent.

    Every rank of the world must call it at the same point: where a group is made, all ranks make
    all groups, in the order of their first ranks.

    Args:
        tp_group: Tensor-parallel (for experts: expert-tensor-parallel) group.
        dp_group: The ranks that the distributed optimizer shards over.
        existing: A group that Megatron has already, taken where it fits on every rank.
    """
    if tp_group.size() == 1:
        return dp_group
    if dp_group.size() == 1:
        return tp_group
    members = _members(tp_group, dp_group)
    fits = existing is not None and dist.get_process_group_ranks(existing) == members
    # Only the first rank of a group names it: what is gathered grows with the world, not with
    # world times group size.
    first = members if dist.get_rank() == members[0] else None
    everyone = gather_objects((fits, first))
    if all(theirs for theirs, _ in everyone):
        assert existing is not None
        return existing
    mine: dist.ProcessGroup | None = None
    for ranks in sorted(named for _, named in everyone if named is not None):
        made = dist.new_group(ranks)
        if isinstance(made, dist.ProcessGroup) and dist.get_rank() in ranks:
            mine = made
    assert mine is not None
    return mine
