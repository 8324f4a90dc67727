"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_muon.offline.writing import write_checkpoint, write_tracker
from tests.unit.checkpoint.small_output import output


@pytest.fixture
def written(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "iter_0000003"
    write_checkpoint(folder, output())
    write_tracker(folder.parent, 3)
    return folder
