"""Runs the checks that require a GPU, on one to eight of them, and writes the results to the docs.

    python tools/gpu_check.py

Each check runs in its own process with a time limit; under ten minutes on one GPU. Each result is
written to docs/gpu_check.json immediately, so that a second call resumes where the first ended;
results of other hardware or another commit are discarded. At the end the table of docs/precision.md
is generated from that file.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

FOUND, PAGE = ROOT / "docs" / "gpu_check.json", ROOT / "docs" / "precision.md"
BEGIN, END = "<!-- gpu-check: begin -->", "<!-- gpu-check: end -->"
OK, DIFFERS, IMPOSSIBLE = "ok", "differs", "not possible here"
MAX_RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table.

    Attributes:
        name: Key in the JSON file.
        what: Text of the table.
        run: ``module:function`` in ``tools.gpu_checks``.
        seconds: Time limit.
        options: Arguments of the function.
        least: Minimum number of GPUs.
        most: Maximum number of ranks.
        capability: Minimum compute capability.
        needs: Required module.
    """

    name: str
    what: str
    run: str
    seconds: int
    options: Mapping[str, Any] = field(default_factory=dict)
    least: int = 1
    most: int = 1
    capability: tuple[int, int] = (0, 0)
    needs: str = ""

    @property
    def function(self) -> Callable[[torch.device], dict[str, Any]]:
        """The function that each rank calls."""
        module, name = self.run.split(":")
        function = getattr(importlib.import_module(f"tools.gpu_checks.{module}"), name)
        return partial(function, **self.options)


FIRST = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""First compute capability of a recipe."""


def _fp8(recipe: str, words: str = "", *, seconds: int = 40, **options: Any) -> Check:
    steps = options.get("steps", 4)
    return Check(
        name="-".join(("fp8", recipe, *words.split())),
        what=f"{recipe}{f', {words}' if words else ''}, {steps} steps: masters at start, codes, "
        "scales, replicas, resume",
        run="training:fp8_weights",
        seconds=seconds,
        options={"recipe": recipe, **options},
        most=MAX_RANKS,
        capability=FIRST[recipe],
        needs="transformer_engine",
    )


CHECKS = (
    Check(
        name="newton-schulz",
        what="Newton-Schulz: error, and rate relative to a product",
        run="kernels:newton_schulz_rates",
        seconds=45,
    ),
    Check(
        name="right-factors",
        what="Orth-Dion's basis: orthonormal, and time against Householder QR",
        run="kernels:right_factors",
        seconds=20,
    ),
    Check(
        name="symmetric-products",
        what="emerging-optimizers' kernel for X Xᵀ against plain products",
        run="kernels:symmetric_products",
        seconds=20,
        capability=(9, 0),
        needs="emerging_optimizers",
    ),
    Check(
        name="shim-codes",
        what="codes and scales of the tests' substitute against Transformer Engine's kernels",
        run="kernels:shim_codes",
        seconds=30,
        capability=(8, 9),
        needs="transformer_engine",
    ),
    Check(
        name="empty-adam",
        what="Transformer Engine's Adam with an empty group",
        run="kernels:empty_group_of_adam",
        seconds=20,
        needs="transformer_engine",
    ),
    _fp8("delayed", steps=20),
    _fp8("tensorwise"),
    _fp8("blockwise"),
    _fp8("mxfp8"),
    _fp8("mxfp8", "gather overlapped", overlap=True, steps=50, seconds=60),
    _fp8("blockwise", "grouped experts", model="fp8-moe", steps=2),
    _fp8("blockwise", "multi-latent attention", model="mla", steps=2),
    _fp8("mxfp8", "output projection", model="output", steps=2),
    Check(
        name="saves",
        what="synchronous and asynchronous saves, dequantization at load streamed or not",
        run="training:saves",
        seconds=40,
        most=MAX_RANKS,
        capability=(9, 0),
        needs="transformer_engine",
    ),
    Check(
        name="step-times",
        what="optimizer step and memory: AdamW, megatron-core's muon, dmuon, Orth-Dion",
        run="training:step_times",
        seconds=75,
    ),
    Check(
        name="split-matrices",
        what="matrices split over ranks (`--dmuon-split-ranks`) on NCCL",
        run="training:split_matrices",
        seconds=60,
        least=2,
        most=MAX_RANKS,
    ),
)


def hardware() -> dict[str, Any]:
    """Return a description of this machine, as stored in the JSON file."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return {"gpus": 0, "name": "", "capability": [0, 0], "torch": torch.__version__}
    return {
        "gpus": min(count, 8),
        "name": torch.cuda.get_device_name(0),
        "capability": list(torch.cuda.get_device_capability(0)),
        "torch": torch.__version__,
    }


def impossible(check: Check, machine: Mapping[str, Any]) -> str:
    """Return the reason why a check cannot run on a machine; empty if it can."""
    if machine["gpus"] < check.least:
        return f"requires {check.least} GPUs, {machine['gpus']} here"
    if tuple(machine["capability"]) < check.capability:
        required = ".".join(map(str, check.capability))
        return f"requires capability {required}, {machine['name']} has less"
    if check.needs and importlib.util.find_spec(check.needs) is None:
        return f"{check.needs} is not installed"
    return ""


def ranks_of(check: Check, machine: Mapping[str, Any]) -> int:
    """Return the number of ranks of a check: 1, 2 or 4, one per GPU, as NCCL requires."""
    return max(n for n in (1, 2, 4) if n == 1 or n <= min(check.most, machine["gpus"]))


def run_check(check: Check, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Run a check in its own processes and return its row of the JSON file."""
    if reason := impossible(check, machine):
        return {"status": IMPOSSIBLE, "reason": reason}
    ranks = ranks_of(check, machine)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", __file__, "--worker", check.name, str(result)]
        try:
            ended = subprocess.run(
                command, timeout=check.seconds, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return {"status": DIFFERS, "reason": f"exceeded {check.seconds} s"}
        if not result.exists():
            last = ended.stderr.strip().splitlines()[-1:] or ["no output"]
            return {"status": DIFFERS, "reason": f"exit code {ended.returncode}: {last[0]}"}
        row: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return {"ranks": ranks, **row}


def work(check: Check, device: torch.device) -> dict[str, Any]:
    """Run a check on one rank and return its row."""
    from tools.gpu_checks.outcome import Differs, NotPossible

    try:
        return {"status": OK, "figures": check.function(device)}
    except NotPossible as error:
        return {"status": IMPOSSIBLE, "reason": str(error)}
    except Differs as error:
        return {"status": DIFFERS, "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"status": DIFFERS, "reason": f"{type(error).__name__}: {error}"}


def _worker(name: str, result: Path) -> None:
    import torch.distributed as dist

    check = next(check for check in CHECKS if check.name == name)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # Tests gather values for comparison over gloo.
    dist.init_process_group("cpu:gloo,cuda:nccl")
    row = work(check, device)
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        worst = next((r for r in rows if r["status"] != OK), row)
        result.write_text(json.dumps(worst), encoding="utf-8")
    dist.destroy_process_group()


def table(found: Mapping[str, Any]) -> str:
    """Return the table of docs/precision.md: one row per check, ``not run`` without a result."""
    machine = found.get("hardware", {})
    where = f" ({machine['gpus']} × {machine['name']})" if machine.get("gpus") else ""
    lines = [f"| check | result{where} |", "|---|---|"]
    for check in CHECKS:
        row = found.get("rows", {}).get(check.name)
        if row is None:
            shown = "not run"
        elif row["status"] == OK:
            figures = "; ".join(f"{key}: {value}" for key, value in row["figures"].items())
            shown = f"ok on {row['ranks']} GPU{'s' if row['ranks'] > 1 else ''}: {figures}"
        else:
            shown = f"{row['status']}: {row['reason']}"
        lines.append(f"| {check.what} | {shown} |")
    return "\n".join(lines)


def write_page(found: Mapping[str, Any], page: Path = PAGE) -> None:
    """Write the table to the docs."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}", encoding="utf-8")


def read_found(path: Path = FOUND) -> dict[str, Any]:
    """Return the results of earlier calls; empty without a file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def check_all(
    checks: Sequence[Check],
    identity: Mapping[str, Any],
    path: Path = FOUND,
    run: Callable[[Check, Mapping[str, Any]], dict[str, Any]] = run_check,
) -> dict[str, Any]:
    """Run the checks without a result, and store each result immediately.

    Args:
        checks: The checks.
        identity: Hardware and commit; results of others are discarded.
        path: The JSON file.
        run: Runs one check.
    """
    found = read_found(path)
    if {key: found.get(key) for key in identity} != dict(identity):
        found = {**identity, "rows": {}}
    for check in checks:
        if found["rows"].get(check.name, {}).get("status") in (OK, IMPOSSIBLE):
            continue
        print(f"{check.name} …", flush=True)
        row = found["rows"][check.name] = run(check, identity["hardware"])
        print(f"{check.name}: {row['status']} {row.get('reason', '')}", flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def main() -> None:
    """Run the checks, or one rank of a check."""
    if sys.argv[1:2] == ["--worker"]:
        _worker(sys.argv[2], Path(sys.argv[3]))
        return
    machine = hardware()
    if not machine["gpus"]:
        sys.exit("no GPU detected: nothing to check")
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = check_all(CHECKS, {"hardware": machine, "commit": head.stdout.strip()})
    write_page(found)
    print(table(found))


if __name__ == "__main__":
    main()
