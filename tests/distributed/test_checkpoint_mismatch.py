"""Mismatched checkpoints in ``pretrain()``: one sentence, on every rank, no hang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_pretrain import DMUON, ORTH_DION, pretrain_with_hooks
from tests.ranks import RankFailed

Ranks = Callable[..., list[Any]]
Flags = tuple[str, ...]

ADAM = ("--optimizer", "adam")
ADAM_WHOLE = (*ADAM, "--dist-ckpt-optim-fully-reshardable")
MUON = ("--optimizer", "muon", "--bf16")
RULE = ("--matrix-rule", "*.linear_fc2.weight:optimizer=adam")


def save(ranks: Ranks, folder: Path, flags: Flags, tp: int = 1) -> None:
    ranks(2, pretrain_with_hooks, folder, folder, tp, 1, 1, flags, init_process_group=False)


def refused(ranks: Ranks, folder: Path, flags: Flags, tp: int = 1) -> str:
    """Return the error of both ranks."""
    with pytest.raises(RankFailed) as failed:
        arguments = (folder, folder.with_name("other"), tp, 1, 2, flags)
        ranks(2, pretrain_with_hooks, *arguments, init_process_group=False)
    reports = failed.value.reports
    assert len(reports) == 2
    messages = {report.partition("CheckpointMismatchError: ")[2] for report in reports.values()}
    (text,) = messages
    assert f"cannot load {folder}" in text
    return text


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (DMUON, ORTH_DION, "state of dmuon, and this run uses --optimizer orth_dion: type --opti"),
        (ORTH_DION, DMUON, "state of orth_dion, and this run uses --optimizer dmuon: type --opti"),
        (MUON, (*DMUON, "--bf16"), "state of megatron-core's muon, and this run uses --optimizer"),
        (ADAM, DMUON, "state of Megatron's Adam with the distributed optimizer, and this run"),
        (ADAM_WHOLE, DMUON, "state of Megatron's Adam, and this run uses --optimizer dmuon"),
        (
            ORTH_DION,
            (*ORTH_DION, "--orth-dion-rank-fraction", "0.25"),
            "type --orth-dion-rank-fraction 0.5",
        ),
        (DMUON, (*DMUON, *RULE), "linear_fc2.weight was trained with the matrix optimizer in"),
        ((*DMUON, *RULE), DMUON, "linear_fc2.weight was trained with Adam in the checkpoint"),
    ],
    ids=[
        "dmuon to orth_dion",
        "orth_dion to dmuon",
        "megatron-core's muon",
        "adam",
        "adam, fully reshardable",
        "rank",
        "rule added",
        "rule removed",
    ],
)
def test_mismatched_state_is_refused_by_a_sentence(
    ranks: Ranks, tmp_path: Path, saved: Flags, loaded: Flags, message: str
) -> None:
    folder = tmp_path / "saved"
    save(ranks, folder, saved)
    text = refused(ranks, folder, loaded)
    assert message in text
    assert "--no-load-optim" in text


def test_the_weights_alone_can_be_loaded(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    save(ranks, folder, DMUON)
    flags = (*ORTH_DION, "--no-load-optim")
    arguments = (folder, tmp_path / "other", 1, 1, 2, flags)
    results = ranks(2, pretrain_with_hooks, *arguments, init_process_group=False)
    assert all(len(losses) for losses, _ in results)


@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_an_incomplete_index_is_reported(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "saved"
    save(ranks, folder, DMUON)
    (metadata,) = folder.glob("iter_*/.metadata")
    if damage == "missing":
        metadata.unlink()
    else:
        metadata.write_bytes(metadata.read_bytes()[:100])
    text = refused(ranks, folder, DMUON)
    assert "it is incomplete: its .metadata" in text
    assert "--ckpt-step" in text


@pytest.mark.parametrize(
    ("step", "damage", "message"),
    [
        ("1", "metadata.json", "it is incomplete: its metadata.json is missing"),
        ("7", "", "saved has iter_0000001: select one with --ckpt-step"),
    ],
)
def test_an_incomplete_checkpoint_is_reported(
    ranks: Ranks, tmp_path: Path, step: str, damage: str, message: str
) -> None:
    folder = tmp_path / "saved"
    save(ranks, folder, DMUON)
    for path in folder.glob("iter_*/metadata.json") if damage else ():
        path.unlink()
    text = refused(ranks, folder, (*DMUON, "--ckpt-step", step))
    assert message in text and "--ckpt-step" in text


@pytest.mark.parametrize("file", ["first", "last"])
@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_a_damaged_file_is_reported(ranks: Ranks, tmp_path: Path, damage: str, file: str) -> None:
    """The first file holds the common state too, which is read before anything else."""
    folder = tmp_path / "saved"
    save(ranks, folder, DMUON)
    path = sorted(folder.glob("iter_*/*.distcp"))[0 if file == "first" else -1]
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-100])
    text = refused(ranks, folder, DMUON)
    assert path.name in text
    assert ("is missing" if damage == "missing" else "its index says") in text
    assert "--ckpt-step" in text


def test_another_models_checkpoint_is_reported(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    save(ranks, folder, (*DMUON, "--ffn-hidden-size", "64"))
    assert "it is another model" in refused(ranks, folder, DMUON)
