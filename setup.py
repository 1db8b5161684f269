"""Metadata and dependencies; the build system and the tools' settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "tp_layers" / "__init__.py").read_text()).group(1)

# huggingface_hub resolves repository ids, tqdm draws the loader's progress.
DIFFUSERS = ["diffusers>=0.42.1", "huggingface_hub", "tqdm"]
TRANSFORMERS = ["transformers>=5.24"]

setup(
    name="tp_layers",
    version=VERSION,
    description="Tensor-parallel layers for diffusion models, with Triton GEMM kernels",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_packages(include=["tp_layers", "tp_layers.*"]),
    package_data={"tp_layers": ["py.typed"]},
    # Each CUDA build of torch pins the triton it was tested with, so triton is given no upper bound here.
    install_requires=["torch>=2.11", "triton>=3.6; platform_system == 'Linux'", "safetensors>=0.5", "numpy"],
    extras_require={
        "diffusers": DIFFUSERS,
        "transformers": TRANSFORMERS,
        # diffusers' own sharded load, which bench/load.py compares with, needs accelerate.
        "bench": [*DIFFUSERS, "pytest-benchmark", "accelerate"],
        # examples/train_digits.py trains on its digits.
        "examples": [*DIFFUSERS, "scikit-learn"],
        "test": [*DIFFUSERS, *TRANSFORMERS, "scikit-learn", "pytest", "pytest-benchmark", "ruff", "mypy"],
    },
    entry_points={"console_scripts": ["tp-layers = tp_layers.cli:main"]},
)
