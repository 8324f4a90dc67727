"""Packaging of megatron-muon: torch and numpy are enough to import it; most else is an extra."""

from pathlib import Path

from setuptools import find_packages, setup

MEGATRON = ["megatron-core>=0.19.2,<0.20", "psutil>=5.9", "absl-py>=2.0", "einops>=0.7"]
COMPARE = ["emerging-optimizers==0.3.0"]
DEMO = ["matplotlib>=3.8"]

readme = Path(__file__).parent / "README.md"

setup(
    name="megatron-muon",
    version="0.1.0",
    description=(
        "Exact Muon inside Megatron's distributed optimizer, at every tensor and data parallel size"
    ),
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_muon", "megatron_muon.*"]),
    package_data={"megatron_muon": ["py.typed"]},
    install_requires=["torch>=2.6", "numpy>=1.26", "pyyaml>=6"],
    extras_require={
        # megatron-core imports psutil (dist_checkpointing.save) and einops (groups of several
        # optimizer instances) without declaring them.
        "megatron": MEGATRON,
        "te": ["transformer-engine[pytorch]"],
        "compare": COMPARE,
        "demo": DEMO,
        "dev": [
            *MEGATRON,
            *COMPARE,
            *DEMO,
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "ruff>=0.9",
            "mypy>=1.14",
        ],
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
