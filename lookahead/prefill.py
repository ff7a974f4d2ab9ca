"""Prefill: a prompt's tokens through the model in chunks, their keys and values into the cache.

Chunks have one fixed size, cut at fixed positions, so that a prompt's cache does not depend on how it
will be decoded.
"""

import torch

from lookahead.kv_cache import KVCache
from lookahead.layout import RowTree
from lookahead.models.llama import Llama

CHUNK_ROWS = 128


def prefill(model: Llama, cache: KVCache, tokens: torch.Tensor) -> None:
    """Commit the keys and values of `tokens` ([P] int, on the model's device) at positions 0..P-1.

    `cache` is that of one sequence (B = 1) with at least CHUNK_ROWS scratch rows.
    """
    for start in range(0, tokens.shape[0], CHUNK_ROWS):
        chunk = tokens[start : start + CHUNK_ROWS].unsqueeze(0)
        rows = torch.arange(chunk.shape[1], device=tokens.device).unsqueeze(0)
        length = torch.full((1,), start, dtype=torch.int32, device=tokens.device)
        count = torch.full_like(length, chunk.shape[1])
        layout = RowTree.chain(chunk.shape[1])
        model.forward(chunk, rows + start, layout, cache, length, live_rows=count)
        cache.commit(rows, count, length)
