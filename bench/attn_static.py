"""What can be said of the attention kernel on a GPU that is not here: its binaries and its limits.

Registers, spills and shared memory come from ahead-of-time builds; programs, waves and microseconds are
arithmetic with the makers' figures. None of it is a measurement, and no kernel reaches the limits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import timing
import torch
from attn_cases import AUTOREGRESSIVE, SHAPES, Case, Heads

from lookahead.errors import InputError

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
LENGTHS = (1024, 4096, 16384)
REPORTED = (AUTOREGRESSIVE, SHAPES[-1])
ELEMENT, DTYPE = "bf16", torch.bfloat16
MODELS = (Heads("MHA 32", 32, 32, 128), Heads("GQA 32:8", 32, 8, 128))


@dataclass(frozen=True)
class Chip:
    """A GPU by its datasheet: dense bfloat16 arithmetic, no sparsity."""

    name: str
    architecture: str
    processors: int
    gb_per_s: float
    tflops: float

    def microseconds(self, case: Case) -> float:
        """The larger of the times to move the bytes and to do the arithmetic."""
        return max(case.bytes_moved / self.gb_per_s / 1e3, case.flops / self.tflops / 1e6)


CHIPS = (
    Chip("A100 80GB SXM", "sm_80", 108, 2039, 312),
    Chip("H100 SXM", "sm_90", 132, 3350, 989),
    Chip("H200", "sm_90", 132, 4800, 989),
    Chip("B200", "sm_100", 148, 8000, 2250),
    Chip("MI300X", "gfx942", 304, 5300, 1307),
)
# Bytes of shared memory of one multiprocessor, and what each block takes beside its own.
SHARED_BYTES = {"sm_80": 164 * 1024, "sm_90": 228 * 1024, "sm_100": 228 * 1024, "gfx942": 64 * 1024}
RESERVED_BYTES = 1024


def blocks_per_processor(build: dict[str, Any]) -> int:
    """Blocks of this binary that fit on one multiprocessor together."""
    architecture, warps, registers = build["architecture"], build["warps"], build["registers"]
    shared, room = build["shared"], SHARED_BYTES[build["architecture"]]
    if architecture.startswith("gfx"):
        # Four units of 512 vector registers a lane, handed out by 8; at most 8 waves each.
        waves = 4 * min(8, 512 // max(8, -(-registers // 8) * 8))
        return min(waves // warps, room // shared if shared else waves)
    # 64 Ki registers, handed out to warps by 256; at most 64 warps and 32 blocks.
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    return min(by_registers, 64 // warps, 32, room // (shared + RESERVED_BYTES))


def build(architectures: Sequence[str]) -> list[dict[str, Any]]:
    """Both kernels' binaries for each architecture and each model's heads."""
    if find_spec("triton") is None:
        raise InputError("the static report needs Triton, which is not installed")
    from ahead_of_time import Request, build_all

    requests = [
        Request(name, ELEMENT, heads.head_dim, heads.num_q_heads, heads.num_kv_heads, merge=merge)
        for name in architectures
        for heads in MODELS
        for merge in (False, True)
    ]
    return list(build_all(requests))


@dataclass(frozen=True)
class Launch:
    """One launch on one chip: programs, how often they fill the chip, and the least time."""

    chip: str
    heads: str
    shape: str
    length: int
    programs: int
    waves: float
    bytes: int
    partial_bytes: int
    flops: int
    limit_us: float


def launches(builds: Sequence[dict[str, Any]]) -> Iterator[Launch]:
    """For each chip that these binaries are for."""
    from lookahead.kernels.attn_mask_launch import Shape, plan
    from lookahead.kernels.tuning import Tile

    tiles = [build for build in builds if not build["merge"] and "error" not in build]
    for chip in CHIPS:
        for built in tiles:
            if built["architecture"] != chip.architecture:
                continue
            heads = next(each for each in MODELS if each.num_kv_heads == built["num_kv_heads"])
            resident = chip.processors * blocks_per_processor(built)
            for shape in REPORTED:
                for length in LENGTHS:
                    case = Case(heads, shape, length, dtype=DTYPE)
                    rows = case.layout.num_rows
                    sizes = (heads.num_q_heads, heads.head_dim, heads.num_kv_heads)
                    the_shape = Shape(1, rows, *sizes, length + rows, length, length)
                    the_plan = plan(the_shape, case.layout, False, Tile(**built["tile"]))
                    programs = the_plan.grid[0] * the_plan.grid[1]
                    partials = the_plan.num_slots * rows * heads.num_q_heads
                    yield Launch(
                        chip.name,
                        heads.name,
                        case.shape_name,
                        length,
                        programs,
                        programs / resident if resident else float("inf"),
                        case.bytes_moved,
                        4 * partials * (heads.head_dim + 2),
                        case.flops,
                        chip.microseconds(case),
                    )


def build_table(builds: Sequence[dict[str, Any]]) -> str:
    header = ["architecture", "group", "kernel", "tile", "registers", "spills"]
    header += ["shared KB", "blocks a processor"]
    return timing.table(header, [_build_cells(build) for build in builds])


def _build_cells(build: dict[str, Any]) -> list[str]:
    kernel = "merge" if build["merge"] else "tiles"
    cells = [build["architecture"], str(build["group"]), kernel, tile_name(build["tile"])]
    if "error" in build:
        return [*cells, build["error"], "", "", ""]
    return [
        *cells,
        str(build["registers"]),
        str(build["spills"]),
        f"{build['shared'] / 1024:.0f}",
        str(blocks_per_processor(build)),
    ]


def tile_name(tile: dict[str, int]) -> str:
    """Rows x keys, warps, stages."""
    return f"{tile['block_m']}x{tile['block_n']} {tile['num_warps']}w {tile['num_stages']}s"


def launch_table(rows: Sequence[Launch]) -> str:
    header = ["chip", "heads", "(W, N, G)", "length", "programs", "waves"]
    header += ["MB", "MB of partials", "GFLOP", "limit us"]
    return timing.table(
        header,
        [
            [
                row.chip,
                row.heads,
                row.shape,
                str(row.length),
                str(row.programs),
                f"{row.waves:.1f}",
                f"{row.bytes / 1e6:.1f}",
                f"{row.partial_bytes / 1e6:.1f}",
                f"{row.flops / 1e9:.2f}",
                f"{row.limit_us:.1f}",
            ]
            for row in rows
        ],
    )


def report(architectures: Sequence[str]) -> dict[str, Any]:
    """Print both tables; returns them for the record."""
    builds = build(architectures)
    rows = list(launches(builds))
    print(
        f"\nnot measured: ahead-of-time builds for {', '.join(architectures)}, {ELEMENT}, batch 1\n\n"
        f"{build_table(builds)}\n\n{launch_table(rows)}\n\n"
        "tile: rows x keys, warps, stages; MB: queries, output, keys and values once; limit: the\n"
        "larger of bytes and arithmetic by the maker's figures, which no kernel reaches\n"
    )
    return {"builds": builds, "launches": [asdict(row) for row in rows]}


def parse_architectures(text: str) -> list[str]:
    """ "sm_80,sm_90" -> names; raises InputError for one that has no figures here."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise InputError(f"--architecture: {name!r} is not known, expected {known}")
    return names
