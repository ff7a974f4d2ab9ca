"""Prefill: a prompt's tokens through the model in chunks, their keys and values into the cache.

Chunks have one fixed size, cut at fixed positions, so that a prompt's cache does not depend on how it
will be decoded.
"""

import torch

from lookahead.kv_cache import KVCache
from lookahead.layout import RowTree
from lookahead.models.llama import Llama

CHUNK_ROWS = 128


def prefill(model: Llama, cache: KVCache, tokens: torch.Tensor, start: int = 0) -> int:
    """Commit the keys and values of `tokens` ([P] int, on the model's device) at positions start..P-1;
    those of the tokens before are there already.

    `cache` is that of one sequence (B = 1) with at least CHUNK_ROWS scratch rows.

    Returns:
        How many tokens went through the model.
    """
    first = start
    while start < tokens.shape[0]:
        # The first chunk of a text that goes on ends where one of a whole text does.
        end = min((start // CHUNK_ROWS + 1) * CHUNK_ROWS, tokens.shape[0])
        chunk = tokens[start:end].unsqueeze(0)
        rows = torch.arange(chunk.shape[1], device=tokens.device).unsqueeze(0)
        length = torch.full((1,), start, dtype=torch.int32, device=tokens.device)
        count = torch.full_like(length, chunk.shape[1])
        layout = RowTree.chain(chunk.shape[1])
        model.forward(chunk, rows + start, layout, cache, length, live_rows=count)
        cache.commit(rows, count, length)
        start = end
    return start - first
