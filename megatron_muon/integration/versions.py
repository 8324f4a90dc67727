"""Which Megatron is supported, and how any other is refused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

SUPPORTED = ((0, 19), (0, 20))
"""megatron-core from the first version (included) to the second (excluded)."""

SUPPORTED_TEXT = "megatron-core 0.19.x"


class MegatronVersionError(ImportError):
    """Megatron is missing or is another version than supported."""


def check_version(version: str) -> None:
    """Refuse a version outside the supported range.

    Args:
        version: megatron-core's version, such as ``0.19.2`` or ``0.20.0rc1+abc``.

    Raises:
        MegatronVersionError: With what was found, what is supported and what to type.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    if not SUPPORTED[0] <= found < SUPPORTED[1]:
        raise MegatronVersionError(
            f"megatron_muon found megatron-core {version}; supported is {SUPPORTED_TEXT}: type "
            "pip install 'megatron-core>=0.19.2,<0.20', or put a core_v0.19.x checkout of "
            "Megatron-LM first on PYTHONPATH"
        )


def require_megatron(*, training: bool) -> str:
    """Check that a supported Megatron can be imported, without importing it.

    Args:
        training: Also need ``megatron.training``.

    Returns:
        The version found.

    Raises:
        MegatronVersionError: Megatron, its training code or its version is not as needed.
    """
    if not _is_there("megatron.core"):
        raise MegatronVersionError(
            f"megatron_muon needs {SUPPORTED_TEXT} and found none on this Python's path: type "
            "pip install 'megatron-core>=0.19.2,<0.20', or put a Megatron-LM checkout on PYTHONPATH"
        )
    if training and not _is_there("megatron.training"):
        raise MegatronVersionError(
            "megatron.core is there but megatron.training is not: megatron_muon hooks Megatron's "
            "training code; type pip install 'megatron-core>=0.19.2,<0.20', or put a Megatron-LM "
            "checkout on PYTHONPATH"
        )
    version = _core_version()
    check_version(version)
    return version


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # No megatron at all, or a file megatron.py that is no package.
        return False


def _core_version() -> str:
    """Version of the megatron.core that an import would give: a checkout comes before a wheel."""
    spec = importlib.util.find_spec("megatron.core")
    if spec is not None and spec.submodule_search_locations:
        numbers = {}
        try:
            with open(
                f"{next(iter(spec.submodule_search_locations))}/package_info.py", encoding="utf-8"
            ) as stream:
                for line in stream:
                    if found := re.match(r"(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", line):
                        numbers[found[1]] = found[2]
        except OSError:
            numbers = {}
        if len(numbers) == 3:
            return f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}"
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
