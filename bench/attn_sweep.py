"""Other tiles for the attention kernel: timed where there is a GPU, else built ahead of time.

Proposes entries for `lookahead/kernels/tuning.py`; does not write them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import attn_gpu
import attn_static
import timing
import torch
from attn_cases import AUTOREGRESSIVE, SHAPES, Case, Heads, WrongResult, check, expect, make_inputs
from tqdm import tqdm

from lookahead.errors import InputError
from lookahead.kernels.tuning import Tile, choose_tile

HEAD_DIMS = (64, 128, 256)
GROUPS = (1, 4)
NUM_Q_HEADS = 32
# Rows, keys, warps, stages. 128 rows with 4 warps spill everywhere and are not tried.
CANDIDATES = (
    Tile(16, 64, 4, 2),
    Tile(32, 64, 4, 2),
    Tile(64, 32, 4, 2),
    Tile(64, 32, 4, 3),
    Tile(64, 32, 8, 2),
    Tile(64, 64, 4, 2),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 8, 2),
    Tile(64, 128, 8, 2),
    Tile(128, 64, 8, 2),
)
LENGTHS = (1024, 8192)
REPEATS = 20


def candidates(architecture: str, head_dim: int) -> list[Tile]:
    """The table's own entry first."""
    return list(dict.fromkeys([choose_tile(architecture, head_dim, 2), *CANDIDATES]))


def build(architecture: str, head_dims: Sequence[int]) -> list[dict[str, Any]]:
    """A report of each candidate's binary."""
    if find_spec("triton") is None:
        raise InputError("--sweep needs Triton, which is not installed")
    from ahead_of_time import Request, build_all

    requests = [
        Request(architecture, "bf16", head_dim, NUM_Q_HEADS, NUM_Q_HEADS // group, False, tile=tile)
        for head_dim in head_dims
        for group in GROUPS
        for tile in candidates(architecture, head_dim)
    ]
    return list(
        tqdm(build_all(requests), total=len(requests), unit="build", leave=False, disable=None)
    )


def build_table(builds: Sequence[dict[str, Any]]) -> str:
    rows = []
    for each in builds:
        is_chosen = Tile(**each["tile"]) == choose_tile(each["architecture"], each["head_dim"], 2)
        cells = [f"{each['head_dim']}", str(each["group"]), attn_static.tile_name(each["tile"])]
        if "error" in each:
            figures = [each["error"][:60], "", "", ""]
        else:
            figures = [str(each["registers"]), str(each["spills"]), f"{each['shared'] / 1024:.0f}"]
            figures.append(str(attn_static.blocks_per_processor(each)))
        rows.append([*cells, *figures, "in use" if is_chosen else ""])
    header = ["head_dim", "group", "tile", "registers", "spills", "shared KB"]
    return timing.table([*header, "blocks a processor", ""], rows)


def time_tiles(
    head_dims: Sequence[int], quick: bool, timer: attn_gpu.ColdTimer
) -> list[dict[str, Any]]:
    """Each candidate's median on this GPU in every case, the candidates in turn; one that cannot run or
    is wrong has a reason instead."""
    from lookahead.kernels.attn_mask_launch import architecture

    name = architecture(timer.device)
    rows: list[dict[str, Any]] = []
    for case in tqdm(list(_cases(head_dims, quick)), unit="case", leave=False, disable=None):
        tiles = candidates(name, case.heads.head_dim)
        rows.extend(_time_case(case, tiles, timer))
        torch.cuda.empty_cache()
    return rows


def _cases(head_dims: Sequence[int], quick: bool) -> Iterator[Case]:
    for head_dim in head_dims:
        for group in GROUPS:
            heads = Heads(f"{head_dim}, {group}", NUM_Q_HEADS, NUM_Q_HEADS // group, head_dim)
            for shape in (SHAPES[-1], AUTOREGRESSIVE):
                for length in LENGTHS[-1:] if quick else LENGTHS:
                    yield Case(heads, shape, length, dtype=attn_gpu.DTYPE)


def _time_case(
    case: Case, tiles: Sequence[Tile], timer: attn_gpu.ColdTimer
) -> list[dict[str, Any]]:
    from lookahead.kernels.attn_mask_launch import attend_triton

    inputs = make_inputs(case, timer.device)
    expected = expect(inputs)
    tensors = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.lengths)
    counts = (inputs.row_start, inputs.live_rows, inputs.row_start)
    calls, reasons = {}, {}
    for tile in tiles:
        try:
            replay, out = attn_gpu.capture(
                lambda tile=tile: attend_triton(*tensors, case.layout, *counts, tile=tile)
            )
            replay()
            check("attend", case, out, expected)
            calls[tile] = replay
        except WrongResult as wrong:
            reasons[tile] = str(wrong)
        except Exception as error:  # out of resources, or whatever the compiler raises
            reasons[tile] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    medians = timer.times({str(tile): call for tile, call in calls.items()}, REPEATS)
    return [
        case.to_dict()
        | {"group": case.heads.group, "tile": vars(tile)}
        | ({"us": medians[str(tile)].median} if tile in calls else {"error": reasons[tile]})
        for tile in tiles
    ]


def propose(rows: Sequence[dict[str, Any]]) -> dict[int, Tile]:
    """For each head size the tile whose time over the fastest one's, averaged over cases, is least;
    only tiles that ran in every case."""
    by_case: dict[tuple[Any, ...], dict[Tile, float]] = defaultdict(dict)
    for row in rows:
        case = tuple(row[key] for key in ("head_dim", "group", "rows", "length"))
        by_case[case][Tile(**row["tile"])] = row.get("us", math.inf)
    scores: dict[int, dict[Tile, float]] = defaultdict(lambda: defaultdict(float))
    for (head_dim, *_), times in by_case.items():
        fastest = min(times.values())
        for tile, time in times.items():
            scores[head_dim][tile] += math.log(time / fastest) if time < math.inf else math.inf
    return {
        head_dim: min(tiles, key=lambda tile: tiles[tile])
        for head_dim, tiles in scores.items()
        if min(tiles.values()) < math.inf
    }


def time_table(rows: Sequence[dict[str, Any]]) -> str:
    header = ["head_dim", "group", "rows", "length", "tile", "us"]
    return timing.table(
        header,
        [
            [
                *(str(row[key]) for key in ("head_dim", "group", "rows", "length")),
                attn_static.tile_name(row["tile"]),
                f"{row['us']:.1f}" if "us" in row else row["error"][:60],
            ]
            for row in rows
        ],
    )


def proposal(architecture: str, tiles: dict[int, Tile]) -> str:
    """As `tuning.py` would have them."""
    lines = [
        f"    {size}: Tile({tile.block_m}, {tile.block_n}, {tile.num_warps}, {tile.num_stages}),"
        for size, tile in sorted(tiles.items())
    ]
    return "\n".join([f'"{architecture}": {{', *lines, "},"])
