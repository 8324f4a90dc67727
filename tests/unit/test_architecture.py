"""Allowed imports, public names, and imports without optional packages."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_muon
from megatron_muon.config import MatrixConfig

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_muon"
MAX_LINES = 400
# Beside the package in a checkout, absent where it is installed.
OUTSIDE = ("benchmarks", "examples", "tests", "tools")

# Part of the package -> parts that it may import besides itself.
ALLOWED = {
    "linalg": set(),
    "matrices": set(),
    "placement": {"matrices", "linalg"},
    "exchange": {"placement", "matrices", "linalg"},
    "optim": {"linalg", "exchange", "placement", "matrices"},
    "checkpoint": {"config"},
    "offline": {"checkpoint", "config", "flags", "linalg", "matrices", "optim"},
    "config": {"matrices"},
    "flags": {"config", "linalg", "matrices"},
    "integration": {
        "linalg",
        "matrices",
        "placement",
        "exchange",
        "optim",
        "checkpoint",
        "config",
        "flags",
    },
    "cpu": set(),
    "dry_run": {"cpu", "integration", "exchange", "linalg", "matrices", "optim", "placement"},
    "benchmark": {"linalg", "placement"},
    "launch": {"integration"},
    "plan": {"dry_run"},
    "__init__": {"config"},
}
# The same inside functions and under TYPE_CHECKING: (file, part).
ALLOWED_LATE = {
    ("__init__.py", "integration"),
    ("checkpoint/__main__.py", "offline"),
    ("integration/launcher.py", "cpu"),
}
# Of torch.distributed, outside exchange (all of it), cpu and dry_run (which replace parts of it).
ALLOWED_DISTRIBUTED = {
    "integration": {"get_rank", "ProcessGroup", "CheckpointException"},
    # torch's classes of checkpoints; none of them needs a process group.
    "checkpoint": {"FileSystemReader", "TensorStorageMetadata"},
    "offline": {
        "_StorageInfo",
        "DefaultSavePlanner",
        "FileSystem",
        "FileSystemWriter",
        "WriteResult",
        "create_default_global_save_plan",
        "create_read_items_for_chunk_list",
        "metadata",
        "narrow_tensor_by_index",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
}
WITHOUT_TORCH = ("matrices", "placement", "config", "launch", "__init__")
VAGUE_NAMES = {"utils", "util", "misc", "helpers", "helper", "common"}


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module, or name in a module; late inside a function or TYPE_CHECKING."""

    target: str
    late: bool


def _imports(tree: ast.AST, package: str) -> Iterator[Import]:
    """Yield every import of a file, including ``importlib.import_module("…")``."""

    def walk(node: ast.AST, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            is_late = late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                is_late = True
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, late)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parent = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*parent, *([base] if base else [])])
                for alias in child.names:
                    yield Import(f"{base}.{alias.name}", late)
            elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
                for argument in child.args[:1]:
                    if isinstance(argument, ast.Constant):
                        yield Import(str(argument.value), late)
            yield from walk(child, is_late)

    return walk(tree, False)


def _distributed_names(tree: ast.AST) -> set[str]:
    """Yield names of torch.distributed used in a file, under any alias of the module."""
    aliases = {"torch.distributed"}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {
                alias.asname
                for alias in node.names
                if alias.asname and alias.name.startswith("torch.distributed")
            }
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (node.module or "").startswith("torch.distributed"):
                    names.add(alias.name)
                elif node.module == "torch" and alias.name == "distributed":
                    aliases.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
            names.add(node.attr)
    return names


def _violations(root: Path) -> list[str]:
    """Yield every violated rule of a file of the package under ``root``."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        file = path.relative_to(root / PACKAGE).as_posix()
        part = file.split("/")[0].removesuffix(".py")
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        if part not in ALLOWED:
            found.append(f"{file}: part without a rule")
            continue
        if len(text.splitlines()) > MAX_LINES:
            found.append(f"{file}: more than {MAX_LINES} lines")
        if VAGUE_NAMES & set(file.removesuffix(".py").split("/")):
            found.append(f"{file}: vague name")
        for one in _imports(tree, ".".join([PACKAGE, *file.split("/")[:-1]])):
            top, *rest = one.target.split(".")
            # ``import megatron_muon`` alone is the package itself.
            other = rest[0] if rest else "__init__"
            late = one.late and (file, other) in ALLOWED_LATE
            if (
                (top == PACKAGE and not (other == part or other in ALLOWED[part] or late))
                or top in OUTSIDE
                or (top == "megatron" and part not in ("integration", "cpu", "dry_run"))
                or (top == "torch" and part in WITHOUT_TORCH)
            ):
                found.append(f"{file}: imports {one.target}")
        if part not in ("exchange", "cpu", "dry_run"):
            used = _distributed_names(tree) - ALLOWED_DISTRIBUTED.get(part, set())
            found += [f"{file}: uses torch.distributed.{name}" for name in sorted(used)]
    return found


def test_imports_point_downwards_and_files_are_short_and_named() -> None:
    assert _violations(ROOT) == []
    files = [path.relative_to(ROOT / PACKAGE) for path in (ROOT / PACKAGE).rglob("*.py")]
    parts = {file.parts[0].removesuffix(".py") for file in files}
    assert parts == set(ALLOWED)
    beside = list((ROOT / "benchmarks").rglob("*.py"))
    assert beside and all(len(path.read_text().splitlines()) <= MAX_LINES for path in beside)


@pytest.mark.parametrize(
    ("file", "text", "violation"),
    [
        ("linalg/a.py", "import megatron_muon.matrices", "imports megatron_muon.matrices"),
        ("linalg/a.py", "from megatron_muon import matrices", "imports megatron_muon.matrices"),
        ("linalg/a.py", "from .. import matrices", "imports megatron_muon.matrices"),
        ("linalg/a.py", "from ..matrices import Rule", "imports megatron_muon.matrices.Rule"),
        ("matrices/a.py", "import torch", "imports torch"),
        ("matrices/a.py", "def f():\n    import megatron_muon.config", "imports megatron_muon.con"),
        ("placement/a.py", "from megatron_muon.optim import x", "imports megatron_muon.optim.x"),
        ("exchange/a.py", "from megatron_muon.optim import x", "imports megatron_muon.optim.x"),
        ("optim/a.py", "import megatron.core", "imports megatron.core"),
        ("optim/a.py", "import torch.distributed as d\nd.all_reduce", "torch.distributed.all_red"),
        ("optim/a.py", "import torch\ntorch.distributed.barrier()", "torch.distributed.barrier"),
        ("optim/a.py", "from torch.distributed import send", "torch.distributed.send"),
        (
            "integration/a.py",
            "from torch import distributed as d\nd.gather()",
            "distributed.gather",
        ),
        ("integration/a.py", "from megatron_muon import cpu", "imports megatron_muon.cpu"),
        ("integration/a.py", "import megatron_muon.offline.x", "imports megatron_muon.offline.x"),
        ("checkpoint/a.py", "def f():\n    import megatron_muon.offline", "megatron_muon.offline"),
        ("offline/a.py", "import megatron.core", "imports megatron.core"),
        ("integration/a.py", "def f():\n    import megatron_muon.cpu", "imports megatron_muon.cpu"),
        ("integration/launcher.py", "import megatron_muon.cpu", "imports megatron_muon.cpu"),
        ("config.py", "from megatron_muon.linalg import x", "imports megatron_muon.linalg.x"),
        ("config.py", "import importlib as i\ni.import_module('megatron.core')", "megatron.core"),
        ("__init__.py", "import megatron_muon.integration", "imports megatron_muon.integration"),
        ("cpu/a.py", "import megatron_muon.exchange", "imports megatron_muon.exchange"),
        ("benchmark.py", "from benchmarks.kernels import x", "imports benchmarks.kernels.x"),
        ("optim/a.py", "\n" * (MAX_LINES + 1), "more than 400 lines"),
        ("optim/utils.py", "", "vague name"),
        ("common/a.py", "", "part without a rule"),
    ],
)
def test_violations_are_detected(tmp_path: Path, file: str, text: str, violation: str) -> None:
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert any(violation in found for found in _violations(tmp_path))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("optim/a.py", "from megatron_muon.linalg import x\nimport torch"),
        ("integration/a.py", "import torch\ntorch.distributed.get_rank()\nimport megatron.core"),
        ("integration/launcher.py", "def f():\n    from megatron_muon import cpu"),
        ("checkpoint/__main__.py", "def f():\n    import megatron_muon.offline.command"),
        ("__init__.py", "if TYPE_CHECKING:\n    import megatron_muon.integration"),
        ("exchange/a.py", "import torch.distributed as d\nd.all_reduce()"),
        ("placement/a.py", "from megatron_muon.matrices import x\nfrom .plan import y"),
    ],
)
def test_valid_imports_are_accepted(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert _violations(tmp_path) == []


_WITHOUT_MEGATRON = """
import importlib, json, pkgutil, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "transformer_engine", "apex", "amp_C", "triton"):
            raise ModuleNotFoundError(f"no {name} here", name=name)

sys.meta_path.insert(0, Missing())
import megatron_muon
light = "torch" in sys.modules
megatron_muon.MatrixConfig()
modules = []
for module in pkgutil.walk_packages(megatron_muon.__path__, "megatron_muon."):
    part = module.name.split(".")[1]
    light_names = (".versions", ".launcher", ".arguments", ".support", ".report", ".hooks")
    is_light = part == "integration" and module.name.endswith(light_names)
    if part not in ("integration", "cpu") or is_light:
        importlib.import_module(module.name)
        modules.append(module.name)
import torch
print(json.dumps([light, torch.cuda.is_initialized(), modules]))
"""


def test_importing_needs_no_megatron_and_no_gpu() -> None:
    """``import megatron_muon`` does not import torch; the rest must not initialize CUDA."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_MEGATRON],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    imported_torch, woke_cuda, modules = json.loads(done.stdout)
    assert not imported_torch
    assert not woke_cuda
    assert {"megatron_muon.optim.muon", "megatron_muon.exchange.runner"} <= set(modules)


def test_public_names_are_frozen() -> None:
    assert megatron_muon.__all__ == [
        "MatrixConfig",
        "__version__",
        "get_matrix_optimizer",
        "install",
        "uninstall",
    ]
    assert callable(megatron_muon.install) and callable(megatron_muon.uninstall)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megatron_muon.nothing


def test_settings_and_their_defaults_are_frozen() -> None:
    assert {f.name: f.default for f in dataclasses.fields(MatrixConfig)} == {
        "optimizer": "dmuon",
        "momentum": 0.95,
        "nesterov": False,
        "scale_mode": "",
        "extra_scale_factor": 1.0,
        "coefficient_type": "quintic",
        "coefficients": None,
        "num_ns_steps": 5,
        "split_qkv": True,
        "split_gate_up": True,
        "split_mla": True,
        "split_ssm": True,
        "split_heads": False,
        "min_dim": 32,
        "compute_dtype": "auto",
        "exchange_dtype": "auto",
        "momentum_dtype": "fp32",
        "exchange_buffer_mb": None,
        "rank_fraction": 0.25,
        "rank_multiple_of": 1,
        "right_factor": "qr",
        "rank_compensation": False,
        "exchange": "auto",
        "state_dtype": "fp32",
        "split_ranks": None,
        "split_min_gflop": 137.0,
        "cost_table": None,
        "ranks_per_node": None,
        "lr": None,
        "min_lr": None,
        "weight_decay": None,
        "rules": (),
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        MatrixConfig().momentum = 0.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        MatrixConfig("dmuon")  # type: ignore[call-arg]


def test_flags_are_frozen() -> None:
    from megatron_muon.integration.arguments import add_matrix_arguments

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--optimizer", default="adam", choices=["adam", "muon"])
    parser.add_argument("--muon-scale-mode", choices=["spectral"])
    before = set(parser._option_string_actions)
    add_matrix_arguments(parser)
    actions = parser._option_string_actions
    assert {flag: (a.dest, a.default) for flag, a in actions.items() if flag not in before} == {
        "--matrix-lr": ("matrix_lr", None),
        "--matrix-min-lr": ("matrix_min_lr", None),
        "--matrix-weight-decay": ("matrix_weight_decay", None),
        "--matrix-rule": ("matrix_rule", []),
        "--matrix-rules": ("matrix_rules", None),
        "--matrix-no-split-gate-up": ("matrix_split_gate_up", True),
        "--matrix-no-split-mla": ("matrix_split_mla", True),
        "--matrix-no-split-ssm": ("matrix_split_ssm", True),
        "--matrix-split-heads": ("matrix_split_heads", False),
        "--matrix-min-dim": ("matrix_min_dim", 32),
        "--orth-dion-rank-fraction": ("orth_dion_rank_fraction", 0.25),
        "--orth-dion-rank-multiple-of": ("orth_dion_rank_multiple_of", 1),
        "--orth-dion-momentum": ("orth_dion_momentum", 0.95),
        "--orth-dion-right-factor": ("orth_dion_right_factor", "qr"),
        "--orth-dion-scale-mode": ("orth_dion_scale_mode", "shape_scaling"),
        "--orth-dion-rank-compensation": ("orth_dion_rank_compensation", False),
        "--orth-dion-state-dtype": ("orth_dion_state_dtype", "fp32"),
        "--orth-dion-exchange": ("orth_dion_exchange", "auto"),
        "--orth-dion-exchange-dtype": ("orth_dion_exchange_dtype", "auto"),
        "--dmuon-coefficients": ("dmuon_coefficients", None),
        "--dmuon-compute-dtype": ("dmuon_compute_dtype", "auto"),
        "--dmuon-exchange-dtype": ("dmuon_exchange_dtype", "auto"),
        "--matrix-momentum-dtype": ("matrix_momentum_dtype", "fp32"),
        "--dmuon-split-ranks": ("dmuon_split_ranks", None),
        "--dmuon-split-min-gflop": ("dmuon_split_min_gflop", 137.0),
        "--dmuon-cost-table": ("dmuon_cost_table", None),
        "--matrix-ranks-per-node": ("matrix_ranks_per_node", None),
        "--matrix-exchange-buffer-mb": ("matrix_exchange_buffer_mb", None),
    }
    assert actions["--optimizer"].choices == ["adam", "muon", "dmuon", "orth_dion"]
    assert actions["--muon-scale-mode"].choices == [
        "spectral",
        "unit_rms_norm",
        "shape_scaling",
        "match_rms_adamw",
    ]


def test_state_keys_are_frozen() -> None:
    from megatron_muon.checkpoint import names
    from megatron_muon.integration import combined_optimizer

    assert names.STATES == (
        "fp32_param",
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "right_factor",
    )
    assert names.state_key("fp32_param", "a.b") == "optimizer.state.fp32_param.a.b"
    assert combined_optimizer.MATRIX_GROUP_KEY == "matrix_optimizer"
