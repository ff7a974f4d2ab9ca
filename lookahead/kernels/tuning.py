"""Written choices of tile, warps and stages for the attention kernel, by architecture and head size.

Knows no Triton: the launcher and the ahead-of-time tests ask here. One tile shape and warp count serve
every program of an architecture, head size and element size, autoregressive rows included, for the
instruction and the order of a reduction follow the tile.

Every entry was chosen from ahead-of-time builds (registers, spills, shared memory); none has been timed
on a GPU yet.
"""

from dataclasses import dataclass

# Keys of a group's partial: long enough that partials stay small beside the keys that they sum, short
# enough that a context of a few thousand keys still fills the chip.
GROUP_KEYS = 512


@dataclass(frozen=True)
class Tile:
    """Rows and keys of a tile, and how it is run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# 16-bit elements, by architecture and padded head size up to and including the key.
HALF: dict[str, dict[int, Tile]] = {
    "sm_80": {
        64: Tile(64, 64, 4, 2),  # 197 registers; 4 warps of 16 rows, softmax within a warp
        # 4 warps fill all 255 registers at 32 keys and spill at 64; 8 need 188.
        128: Tile(64, 32, 8, 2),
        256: Tile(32, 64, 8, 2),  # 204; 64 rows spill for groups of 3 and 7
    },
    "sm_90": {
        64: Tile(64, 64, 4, 3),  # wgmma of 64 rows, 176 registers; 56 KB leave room for 4 blocks
        128: Tile(64, 32, 4, 3),  # 64 keys spill without grouped heads
        256: Tile(32, 64, 8, 2),  # as on sm_80
    },
    "sm_100": {
        64: Tile(64, 64, 4, 2),  # tcgen05, 164 registers
        128: Tile(64, 64, 8, 2),  # 4 warps need 254 registers, 8 need 157
        256: Tile(32, 64, 8, 2),  # as on sm_80
    },
    "gfx942": {
        64: Tile(64, 64, 4, 2),  # 172 vector registers
        128: Tile(64, 32, 4, 2),  # 178; 64 keys need 247
        256: Tile(64, 32, 8, 2),  # 210; 4 warps need 314
    },
}
# float32 has no tensor-core product of full precision: small tiles, or the unrolled sums spill.
FLOAT32 = {64: Tile(32, 32, 4, 2), 256: Tile(16, 16, 4, 2)}
# Triton's interpreter: few programs, as each costs the same.
INTERPRETED = Tile(64, 64, 4, 1)


def choose_tile(architecture: str, head_dim: int, itemsize: int) -> Tile:
    """The tile for an architecture, a head size, and the bytes of an element.

    `architecture` is "sm_80", "sm_90", "sm_100", "gfx942", or "cpu" for the interpreter; other names
    of one family take the entry of the nearest older member.
    """
    if architecture == "cpu":
        return INTERPRETED
    table = FLOAT32 if itemsize == 4 else HALF[_family(architecture)]
    return next(tile for largest, tile in sorted(table.items()) if head_dim <= largest)


def _family(architecture: str) -> str:
    if architecture in HALF:
        return architecture
    if architecture.startswith("gfx"):
        return "gfx942"
    number = int(architecture.removeprefix("sm_"))
    # 8.x and 12.x are consumer chips with the older instruction; 9.0 and 10.x have their own.
    return {9: "sm_90", 10: "sm_100"}.get(number // 10, "sm_80")
