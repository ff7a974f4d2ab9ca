"""A trial of attention: has a verified row the bits of the autoregressive row on this device?"""

from functools import cache

import torch

from lookahead.kernels.attn_mask import attend
from lookahead.layout import LookaheadLayout

# Long enough for several groups of keys, and short of the end of any block of them.
LENGTH = 1100
LAYOUT = LookaheadLayout(window=3, ngram=4, guesses=2)
ONE_ROW = LookaheadLayout(window=0, ngram=2, guesses=0)


def keeps_bits(
    implementation: str,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Runs a step of two candidates, and each row of their paths once more alone behind the others."""
    heads = (num_q_heads, num_kv_heads, head_dim)
    return _keeps_bits(implementation, heads, dtype, device, torch.get_num_threads())


@cache
def _keeps_bits(
    implementation: str,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
) -> bool:
    """`num_threads` is looked at by nobody here, but the library may."""
    num_q_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    row_start = LENGTH + LAYOUT.num_rows
    shape = (1, num_kv_heads, row_start + LAYOUT.num_rows, head_dim)
    # Large values, so that their sum's rounding shows.
    caches = [draw(*shape), draw(*shape) * 100]
    q = 2 * draw(1, LAYOUT.num_rows, num_q_heads, head_dim)

    def run(q: torch.Tensor, caches: list[torch.Tensor], length: int) -> torch.Tensor:
        num_rows = q.shape[1]
        return attend(
            q,
            caches[0],
            caches[1],
            torch.tensor([length], dtype=torch.int32, device=device),
            LAYOUT if num_rows > 1 else ONE_ROW,
            row_start=row_start,
            live_rows=torch.tensor([num_rows], dtype=torch.int32, device=device),
            implementation=implementation,
        )

    together = run(q, caches, LENGTH)
    for path in LAYOUT.candidate_paths:
        for depth, row in enumerate(path):
            alone = [part.clone() for part in caches]
            for part, own in zip(alone, caches, strict=True):
                for place, ancestor in enumerate(path[:depth]):
                    part[:, :, LENGTH + place] = own[:, :, row_start + ancestor]
                part[:, :, row_start] = own[:, :, row_start + row]
            single = run(q[:, row : row + 1].contiguous(), alone, LENGTH + depth)
            if not torch.equal(single, together[:, row : row + 1]):
                return False
    return True
