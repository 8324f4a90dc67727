"""The logic of tools/gpu_check.py: what is run where, what is kept, and the table it makes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import gpu_check
from tools.gpu_check import CHECKS, DIFFERS, IMPOSSIBLE, OK, Check
from tools.gpu_checks.outcome import Differs, NotPossible

H100 = {"gpus": 1, "name": "H100", "capability": [9, 0], "torch": "2"}
B200 = {"gpus": 8, "name": "B200", "capability": [10, 0], "torch": "2"}
IDENTITY = {"hardware": H100, "commit": "abc"}


def _check(name: str, **changed: Any) -> Check:
    return Check(name=name, what=f"what of {name}", run="kernels:shim_codes", seconds=5, **changed)


def test_all_checks_take_less_than_ten_minutes_on_one_gpu() -> None:
    assert sum(check.seconds for check in CHECKS if check.least == 1) < 600
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_names_a_function(megatron: Any, check: Check) -> None:
    assert callable(check.function)


def test_unsupported_checks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    several = _check("several", least=2, most=4)
    assert gpu_check.impossible(several, H100) == "requires 2 GPUs, 1 here"
    assert gpu_check.impossible(several, B200) == ""
    new = _check("new", capability=(10, 0))
    assert gpu_check.impossible(new, H100) == "requires capability 10.0, H100 has less"
    assert gpu_check.impossible(new, B200) == ""
    assert gpu_check.impossible(_check("x", needs="no_such"), B200) == "no_such is not installed"
    monkeypatch.setattr(subprocess, "run", None)  # nothing is started
    assert gpu_check.run_check(new, H100)["status"] == IMPOSSIBLE


@pytest.mark.parametrize(("gpus", "most", "ranks"), [(1, 4, 1), (2, 4, 2), (3, 4, 2), (8, 4, 4)])
def test_a_rank_has_a_gpu_of_its_own(gpus: int, most: int, ranks: int) -> None:
    assert gpu_check.ranks_of(_check("x", most=most), {**B200, "gpus": gpus}) == ranks
    assert gpu_check.ranks_of(_check("x"), B200) == 1


def test_a_second_call_continues_the_first(tmp_path: Path) -> None:
    path, called = tmp_path / "found.json", []
    checks = [_check(name) for name in ("a", "b", "c", "d")]

    def run(check: Check, machine: Mapping[str, Any]) -> dict[str, Any]:
        called.append(check.name)
        if check.name == "c" and called.count("c") == 1:
            raise KeyboardInterrupt
        status = {"a": IMPOSSIBLE, "b": DIFFERS if called.count("b") == 1 else OK}
        return {"status": status.get(check.name, OK), "figures": {}, "reason": "r", "ranks": 1}

    with pytest.raises(KeyboardInterrupt):
        gpu_check.check_all(checks, IDENTITY, path, run)
    assert set(json.loads(path.read_text())["rows"]) == {"a", "b"}
    found = gpu_check.check_all(checks, IDENTITY, path, run)
    assert called == ["a", "b", "c", "b", "c", "d"]
    assert [row["status"] for row in found["rows"].values()] == [IMPOSSIBLE, OK, OK, OK]
    gpu_check.check_all(checks, {**IDENTITY, "commit": "other"}, path, run)
    assert called[6:] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (None, OK, None),
        (Differs("7 of 9 codes"), DIFFERS, "7 of 9 codes"),
        (NotPossible("no kernel"), IMPOSSIBLE, "no kernel"),
        (RuntimeError("CUDA error"), DIFFERS, "RuntimeError: CUDA error"),
    ],
)
def test_a_rank_reports_the_result_of_a_check(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, status: str, reason: str | None
) -> None:
    def function(device: torch.device) -> dict[str, Any]:
        if error is not None:
            raise error
        return {"figure": 1}

    monkeypatch.setattr(Check, "function", property(lambda check: function))
    row = gpu_check.work(_check("x"), torch.device("cpu"))
    assert row["status"] == status and row.get("reason") == reason
    assert row.get("figures") == ({"figure": 1} if error is None else None)


@pytest.mark.parametrize("outcome", ["written", "nothing", "too long"])
def test_a_process_that_ends_without_a_result_is_a_difference(
    monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    def run(command: list[str], **options: Any) -> Any:
        assert "--nproc-per-node=1" in command and command[-3:-1] == ["--worker", "x"]
        assert options["timeout"] == 5
        if outcome == "too long":
            raise subprocess.TimeoutExpired(command, 5)
        if outcome == "written":
            Path(command[-1]).write_text(json.dumps({"status": OK, "figures": {"a": 1}}))
        return subprocess.CompletedProcess(command, 1, "", "first\nSegmentation fault\n")

    monkeypatch.setattr(subprocess, "run", run)
    row = gpu_check.run_check(_check("x"), H100)
    assert (
        row
        == {
            "written": {"status": OK, "figures": {"a": 1}, "ranks": 1},
            "nothing": {"status": DIFFERS, "reason": "exit code 1: Segmentation fault"},
            "too long": {"status": DIFFERS, "reason": "exceeded 5 s"},
        }[outcome]
    )


def test_the_table_of_the_docs_is_that_of_the_file() -> None:
    page = gpu_check.PAGE.read_text(encoding="utf-8")
    written = page.partition(gpu_check.BEGIN)[2].partition(gpu_check.END)[0].strip()
    assert written == gpu_check.table(gpu_check.read_found())


def test_results_are_filled_in(tmp_path: Path) -> None:
    first, second, third, *_ = CHECKS
    rows = {
        first.name: {"status": OK, "figures": {"bf16": "80 %"}, "ranks": 2},
        second.name: {"status": DIFFERS, "reason": "off by 1"},
        third.name: {"status": IMPOSSIBLE, "reason": "no kernel"},
    }
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu_check.BEGIN}\nan earlier table\n{gpu_check.END}\nafter\n")
    gpu_check.write_page({**IDENTITY, "rows": rows}, page)
    text = page.read_text()
    assert (
        text.startswith("before\n")
        and text.endswith("\nafter\n")
        and "an earlier table" not in text
    )
    assert "| check | result (1 × H100) |" in text
    assert f"| {first.what} | ok on 2 GPUs: bf16: 80 % |" in text
    assert f"| {second.what} | differs: off by 1 |" in text
    assert f"| {third.what} | not possible here: no kernel |" in text
    assert text.count("| not run |") == len(CHECKS) - 3
