"""Packaging. Tool settings live in pyproject.toml, exact tested versions in constraints.txt."""

from setuptools import find_packages, setup

TEST = [
    "pytest>=8",
    "pytest-xdist>=3.5",  # a test process for each core
    "transformers>=4.48",  # an independent implementation that tests compare with
    "gguf>=0.16",
    "numpy",
]

setup(
    name="lookahead",
    version="0.1.0",
    description="Lookahead decoding for LLaMA-family models: the model's own text, in fewer steps",
    license="Apache-2.0",
    packages=find_packages(include=["lookahead", "lookahead.*"]),
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        "triton>=3.2; platform_system == 'Linux' and platform_machine == 'x86_64'",
        "numba>=0.62",
        "safetensors>=0.4",
        "sentencepiece>=0.2",
        "tokenizers>=0.20",
        "jinja2>=3.1.6",
        "tqdm>=4.60",
        "platformdirs>=4",
    ],
    extras_require={
        "dev": [*TEST, "ruff", "mypy"],
        "bench": ["transformers>=4.48", "gguf>=0.16", "matplotlib"],
        "gguf": ["gguf>=0.16"],
        "hub": ["huggingface_hub>=0.34"],
    },
)
