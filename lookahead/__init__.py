"""Lookahead decoding for LLaMA-family models: the model's own text, in fewer steps."""

from lookahead.config import LookaheadConfig, SamplingConfig
from lookahead.engine import Engine
from lookahead.errors import InputError
from lookahead.results import Chunk, Result

__all__ = ["Chunk", "Engine", "InputError", "LookaheadConfig", "Result", "SamplingConfig"]
