"""A model's rows tried out: whether a verified row has the bits of the autoregressive one."""

from collections.abc import Callable

import torch

from lookahead.config import ModelConfig
from lookahead.kv_cache import KVCache
from lookahead.layout import LookaheadLayout, RowTree


def try_out(
    config: ModelConfig, dtype: torch.dtype, choose: Callable[..., tuple[torch.Tensor, ...]]
) -> str | None:
    """Run a step and its candidates' rows once more alone: why the model is not exact, if so.

    Also has all that a step runs compiled, or read from disk, before the first step: in one thread,
    so that nobody waits for a thread that was interrupted.

    Args:
        choose: given what `Llama.forward` takes as a tuple, rows and a number of threads, returns their
            logits first.
    """
    layout, one_row = LookaheadLayout(2, 3, 2), LookaheadLayout(0, 2, 0)
    room, num_rows = layout.levels + 1, layout.num_rows
    shape = (config.num_layers, 2, 1, config.num_kv_heads, room + num_rows, config.head_dim)
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)

    def new_cache() -> KVCache:
        return KVCache(torch.zeros(shape, dtype=dtype), room, "numba")

    def logits(tokens: torch.Tensor, tree: RowTree, cache: KVCache, length: int) -> torch.Tensor:
        positions = length + torch.tensor(tree.depths)
        given = (tokens[None], positions[None], tree, cache, zero + length, one * len(tokens))
        return choose(given, torch.arange(len(tokens)), num_threads=1)[0]

    tokens = torch.arange(num_rows) % config.vocab_size
    together = logits(tokens, layout, new_cache(), 0)
    for path in layout.candidate_paths:
        cache = new_cache()
        for depth, row in enumerate(path):
            alone = logits(tokens[[row]], one_row, cache, depth)
            cache.commit(zero[None], one, zero + depth)
            if not torch.equal(alone[0].nan_to_num(), together[row].nan_to_num()):
                return "a verified row had other bits than the autoregressive row on a trial"
    return None
