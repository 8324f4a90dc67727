"""Which Megatron is accepted, and the sentence for any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_muon.integration.versions import MegatronVersionError, check_version

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2", "0.19.12", "0.19.0rc3+abc", "0.19"])
def test_a_supported_version_is_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize(
    "version", ["0.18.9", "0.20.0", "0.20.0rc1", "1.19.0", "0.2.19", "0.190.0", "3.0", "", "main"]
)
def test_another_version_is_refused_with_what_to_type(version: str) -> None:
    with pytest.raises(MegatronVersionError) as error:
        check_version(version)
    assert f"found megatron-core {version};" in str(error.value)
    assert "supported is megatron-core 0.19.x" in str(error.value)
    assert "pip install 'megatron-core>=0.19.2,<0.20'" in str(error.value)
    assert "PYTHONPATH" in str(error.value)


def _fake(
    folder: Path, version: str | None = None, *, training: bool = True, metadata: str | None = None
) -> Path:
    """A folder with a megatron that says how old it is, and fails when anyone imports it."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise RuntimeError('imported')")
    if training:
        (folder / "megatron" / "training").mkdir()
        (folder / "megatron" / "training" / "__init__.py").write_text("raise RuntimeError")
    if version is not None:
        numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        (core / "package_info.py").write_text("\n".join(f"{n} = {v}" for n, v in numbers))
    if metadata is not None:
        info = folder / f"megatron_core-{metadata}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: megatron-core\nVersion: {metadata}\n")
    return folder


def _require(*paths: Path, training: bool = True) -> str:
    """The answer of a Python that sees these folders and no site-packages."""
    code = (
        "from megatron_muon.integration.versions import *\n"
        f"try:\n    print(require_megatron(training={training}))\n"
        "except MegatronVersionError as error:\n    print('refused:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))},
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_megatron_is_found_without_being_imported(tmp_path: Path) -> None:
    assert _require(_fake(tmp_path, "0.19.2")) == "0.19.2"


def test_no_megatron_at_all() -> None:
    answer = _require()
    assert answer.startswith("refused: megatron_muon needs megatron-core 0.19.x and found none")
    assert "pip install 'megatron-core>=0.19.2,<0.20'" in answer
    assert "Megatron-LM checkout on PYTHONPATH" in answer


def test_a_megatron_without_core(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "energon").mkdir(parents=True)
    assert _require(tmp_path).startswith("refused: megatron_muon needs megatron-core 0.19.x")


def test_a_file_called_megatron_is_not_megatron(tmp_path: Path) -> None:
    (tmp_path / "megatron.py").write_text("")
    assert _require(tmp_path).startswith("refused: megatron_muon needs megatron-core 0.19.x")


@pytest.mark.parametrize("version", ["0.18.0", "0.20.1"])
def test_another_version_on_the_path(tmp_path: Path, version: str) -> None:
    answer = _require(_fake(tmp_path, version))
    assert answer.startswith(f"refused: megatron_muon found megatron-core {version}; supported is")


def test_core_without_training_code(tmp_path: Path) -> None:
    fake = _fake(tmp_path, "0.19.1", training=False)
    assert _require(fake, training=False) == "0.19.1"
    answer = _require(fake)
    assert answer.startswith("refused: megatron.core is there but megatron.training is not")
    assert "Megatron-LM checkout on PYTHONPATH" in answer


def test_a_checkout_comes_before_an_installed_wheel(tmp_path: Path) -> None:
    """It is what an import would give, whatever the wheel's metadata say."""
    checkout = _fake(tmp_path / "checkout", "0.18.0")
    wheel = _fake(tmp_path / "wheel", "0.19.2", metadata="0.19.2")
    assert "found megatron-core 0.18.0" in _require(checkout, wheel)
    assert _require(wheel, checkout) == "0.19.2"


def test_without_version_file_the_metadata_are_asked(tmp_path: Path) -> None:
    assert _require(_fake(tmp_path, metadata="0.19.4")) == "0.19.4"


def test_without_any_version_it_is_refused(tmp_path: Path) -> None:
    assert "found megatron-core of unknown version" in _require(_fake(tmp_path))
