"""The symmetric GPU kernel itself against float64, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# The result is rounded to bf16, which the interpreter does by cutting bits off.
TOLERANCE = 2**-8


@pytest.mark.slow
def test_emerging_optimizers_kernel_is_correct():
    for module in ("triton", "emerging_optimizers", "absl"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install 'emerging-optimizers>=0.3'")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_kernel.py"))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["passes our check"]
    for error in found["errors"]:
        assert error["relative"] < TOLERANCE
        assert error["asymmetric"] == 0.0
