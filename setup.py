"""Installs mas_jax: `pip install -e .`; extras for accelerators, compile plans, tests and more."""

import re
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (root / "mas_jax/__init__.py").read_text())[1]

setup(
    name="mas_jax",
    version=version,
    description="Role-specific learning signals for teams of language-model agents, in JAX.",
    long_description=(root / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mas_jax", "mas_jax.*"]),
    package_data={
        "mas_jax": ["assets/*/*", "assets/math/*/*"],
        "mas_jax.agents": ["prompts/*/*", "*.json"],
        "mas_jax.planning": ["records/*.json", "records/table/*.json", "records/plans/*.json"],
    },
    python_requires=">=3.11",
    install_requires=[
        "absl-py>=2.1",
        "flax>=0.12,<0.13",
        "httpx2>=2,<3",
        "huggingface_hub>=1,<3",
        "importlib_resources>=6",  # tensorflow-datasets imports it without asking for it
        "jax>=0.10,<0.12",
        "jinja2>=3.1",  # transformers renders chat templates with it, and does not ask for it
        "jsonschema>=4.20,<5",
        # with the parser's runtime that its grammars were generated for last
        "math-verify[antlr4_13_2]>=0.9,<0.10",
        "matplotlib>=3.8,<4",
        "ml-collections>=1.0,<2",
        "numpy>=2.0,<3",
        "optax>=0.2.5,<0.3",
        "protobuf>=4.21",  # the toy tokenizer is built as a sentencepiece ModelProto
        "orbax-checkpoint>=0.11.30,<0.13",
        "pyarrow>=15",
        "rich>=13,<16",
        "safetensors>=0.5,<1",
        # ScaNN ships wheels for Linux x86-64 only; elsewhere the exact index serves
        "scann>=1.4.2,<2; sys_platform == 'linux' and platform_machine == 'x86_64'",
        "scipy>=1.13,<2",
        "sentencepiece>=0.2,<0.3",
        "tensorboardX>=2.6,<3",
        "tensorflow-datasets>=4.9.9,<5",
        "tensorstore>=0.1.75,<0.2",
        "transformers>=5.0,<6",
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "cuda": ["jax[cuda13]; sys_platform == 'linux'"],
        "api": ["openai>=3.57,<4"],
        "bm25": ["bm25s>=0.2,<0.4"],
        "plan": ["libtpu>=0.0.52"],  # the TPU compiler, which needs no TPU
        "notebook": ["ipykernel>=6.29", "nbclient>=0.10"],
        "serve": ["starlette>=1,<2", "uvicorn>=0.30"],
        "test": [
            "accelerate>=1.10",  # transformers' GGUF loader
            "bm25s>=0.2,<0.4",
            "chex>=0.1.90",
            "filelock>=3.15",
            "gguf>=0.17",
            "hypothesis>=6.100",
            "ipykernel>=6.29",
            "markdown-it-py>=3",
            "nbclient>=0.10",
            "openai>=3.57,<4",
            "pytest>=8",
            "pytest-xdist>=3.5",
            "pyyaml>=6",
            "ruff>=0.12",
            "starlette>=1,<2",
            "torch>=2.8",  # the reference that the model is compared with
            "uvicorn>=0.30",
        ],
    },
)
