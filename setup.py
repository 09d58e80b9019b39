"""Build script: three packages (``pipe``, ``offload``, ``gradcache``) and the ``benchmarks`` that measure them."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# Read, since an import needs torch.
VERSION = (HERE / "offload" / "__init__.py").read_text(encoding="utf-8").split('__version__ = "')[1].split('"')[0]

setup(
    name="gradstream",
    version=VERSION,
    description="Train models and batches larger than memory: streamed shards, micro-batches, gradient caching",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["offload*", "pipe*", "gradcache*"]),
    package_data={"offload": ["py.typed"], "pipe": ["py.typed"], "gradcache": ["py.typed"]},
    install_requires=["torch>=2.8", "psutil"],
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.7",
            "hypothesis>=6",
            "numpy",
            "safetensors>=0.4",
            "fairscale==0.4.13",
        ],
        "bench": ["matplotlib>=3.8", "numpy", "tqdm"],
        # What the question pipe-ladder measures beside ours.
        "ancestors": ["fairscale==0.4.13", "torchgpipe==0.0.7"],
        # What torchrec needs. It asks for a CUDA build of fbgemm, so it is installed by hand on a machine without one:
        # pip install --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0
        "torchrec": ["tensordict", "torchmetrics==1.0.3", "tqdm", "pyre-extensions", "numpy"],
        "jax": ["jax>=0.4.30"],
        "sentence-transformers": ["sentence-transformers>=3"],
        "huggingface": ["transformers>=4.40"],
        # What docs/trainers.md shows.
        "trainers": ["transformers>=5", "sentence-transformers>=6", "accelerate>=1.1", "datasets"],
        # The site: ruff formats the signatures.
        "docs": ["mkdocs-material>=9.5,<10", "mkdocstrings[python]>=1", "ruff==0.17.6"],
        "lint": ["ruff==0.17.6", "mypy==2.4.1", "types-psutil"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
