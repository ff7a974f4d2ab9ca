"""Lookahead decoding for LLaMA-family models: the model's own text, in fewer steps."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookahead.config import LookaheadConfig, SamplingConfig
    from lookahead.engine import Engine
    from lookahead.errors import InputError
    from lookahead.results import Chunk, Result

__all__ = ["Chunk", "Engine", "InputError", "LookaheadConfig", "Result", "SamplingConfig"]

_HOMES = {
    "Chunk": "results",
    "Engine": "engine",
    "InputError": "errors",
    "LookaheadConfig": "config",
    "Result": "results",
    "SamplingConfig": "config",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: a command line that refuses its options, or is
    interrupted as it starts, does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
