"""Checkpoints that real runs of Megatron saved, converted by the command line, for tests."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.offline.command import main
from megatron_muon.offline.conversion import plan_conversion
from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.settings import ConvertSettings
from megatron_muon.offline.verification import compare
from megatron_muon.offline.writing import write_checkpoint, write_tracker
from tests.distributed import pretraining
from tests.distributed.test_pretrain import DMUON, ORTH_DION, pretrain_with_hooks

Ranks = Callable[..., list[Any]]
Flags = tuple[str, ...]

ADAM = ("--optimizer", "adam", "--dist-ckpt-optim-fully-reshardable")
ADAM_BUCKETS = ("--optimizer", "adam")
MUON = ("--optimizer", "muon", "--bf16")
ADAM_PLAIN = ("--optimizer", "adam", pretraining.NOT_DISTRIBUTED)
MUON_PLAIN = ("--optimizer", "muon", pretraining.NOT_DISTRIBUTED)
"""The only supported mode of megatron-core's muon for fp32 weights."""
MOE = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "40"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-router-load-balancing-type", "none"),
)
MTP = ("--mtp-num-layers", "1")
RANK = ("--orth-dion-rank-fraction", "0.5")
OF: dict[str, Flags] = {"orth_dion": RANK}
"""Flags of ``convert`` for a target."""

STEPS = 2
"""Of every run that saves a source."""

TARGET: dict[str, Flags] = {"adam": ADAM, "dmuon": DMUON, "orth_dion": ORTH_DION, "muon": MUON}
"""Flags of a run with a target of ``convert``."""


class Saves:
    """Folders that runs have saved into, each run once.

    Args:
        ranks: Starts ranks.
        folder: Where they go.
    """

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._made: dict[tuple[Any, ...], Path] = {}

    def __call__(self, *flags: str, tp: int = 1, pp: int = 1, steps: int = STEPS) -> Path:
        key = (flags, tp, pp, steps)
        if key not in self._made:
            folder = self._folder / str(len(self._made))
            train(self._ranks, folder, folder, flags, tp=tp, pp=pp, steps=steps)
            self._made[key] = folder
        return self._made[key]


def train(
    ranks: Ranks,
    load: Path,
    save: Path,
    flags: Sequence[str],
    *,
    tp: int = 1,
    pp: int = 1,
    steps: int = STEPS + 1,
    run: Callable[..., Any] = pretrain_with_hooks,
) -> list[list[float]]:
    """Losses of every rank of a run on two ranks, from what ``load`` holds to iteration ``steps``.

    With as many steps as ``load`` has made, it loads and saves and does nothing else.
    """
    arguments = (load, save, tp, pp, steps, tuple(flags))
    results = ranks(2, run, *arguments, init_process_group=False)
    return [losses for losses, _ in results]


def convert(source: Path, target: Path, to: str, *flags: str) -> Checkpoint:
    """Convert by the command line; the source must not change."""
    before = digest(source)
    assert main(["convert", str(source), str(target), "--to", to, *flags]) == 0
    assert digest(source) == before
    return Checkpoint(target)


def without_arguments(source: Path, target: Path) -> Path:
    """A checkpoint of Adam like Megatron-Bridge's, without arguments in its common state."""
    checkpoint = Checkpoint(source)
    settings = ConvertSettings(to="adam", matrix=MatrixConfig())
    output = plan_conversion(checkpoint, settings)
    common = {key: value for key, value in output.common.items() if key != "args"}
    step = checkpoint.common.value["iteration"]
    write_checkpoint(
        target / f"iter_{step:07d}", dataclasses.replace(output, common=common), source=checkpoint
    )
    write_tracker(target, step)
    return target


def digest(folder: Path) -> dict[str, str]:
    """Hash of every file of a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def different(
    first: Path | Checkpoint, second: Path | Checkpoint, starting: str, tolerance: float = 0.0
) -> list[str]:
    """Return differing tensors with a name prefix; at least one must be compared."""
    a, b = (c if isinstance(c, Checkpoint) else Checkpoint(c) for c in (first, second))
    found = [
        (name, difference)
        for name, difference in compare(a, b, tolerance)
        if name.startswith(starting)
    ]
    assert found
    return [f"{name}: {difference}" for name, difference in found if difference is not None]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the single sentence of a failing command."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    message = capsys.readouterr().err
    assert (
        message.startswith("megatron_muon: ")
        and message.endswith(".\n")
        and message.count("\n") == 1
    )
    return message


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Learnable text: every token has a fixed successor."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        seq, vocab = pretraining.SEQ, pretraining.VOCAB
        start = torch.randint(vocab, (), generator=torch.Generator().manual_seed(index))
        text = (start + 5 * torch.arange(seq + 1)) % vocab
        return {"tokens": text[:-1], "labels": text[1:], "position_ids": torch.arange(seq)}


def pretrain_on_counting(rank: int, *args: Any) -> Any:
    """``pretrain_with_hooks`` on text that can be learned."""
    pretraining.Text = Counting  # type: ignore[assignment, misc]
    return pretrain_with_hooks(rank, *args)
