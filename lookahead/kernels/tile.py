"""The innermost loop of every product on a CPU: a tile of sums held in registers.

`multiply` gives y = x @ w + init for rows of x and features of w. Each output is a sum of chains of
CHAIN multiply-adds in order of its inner index, whatever rows and features run beside it. Where the
processor multiplies pairs of bfloat16 (AVX512-BF16), two neighbours of the inner index are one link.
"""

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from lookahead.kernels.simd_types import (
    IS_X86,
    LANES,
    LINE,
    PointerType,
    broadcast,
    emit_ask,
    emit_fma,
    emit_load,
    emit_store,
    kernel,
    number,
    pointer_to,
)


def _target_features() -> set[str]:
    """What Numba compiles for: this processor, unless it was told of another."""
    told = getattr(config, "CPU_FEATURES", None)
    if told is not None:
        found = {feature[1:] for feature in told.split(",") if feature.startswith("+")}
    else:
        host = binding.get_host_cpu_features()
        found = {name for name, is_there in host.items() if is_there}
    may_use_avx = getattr(config, "ENABLE_AVX", True)
    return {name for name in found if may_use_avx or not name.startswith("avx")}


HAS_PAIRS = "avx512bf16" in _target_features()
# Elsewhere on x86 LLVM calls functions for float16 that may not be there.
HAS_FLOAT16 = not IS_X86 or "f16c" in _target_features()
# Rows and vectors of features of the largest tile: as many sums as there are registers for them.
TILE_ROWS, TILE_VECTORS = (6, 4) if "avx512f" in _target_features() else (2, 2)

# Links of a chain: short ones lose less to rounding, long ones leave their registers more seldom.
CHAIN = 128

_I32, _I64 = ir.IntType(32), ir.IntType(64)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def multiplies_pairs(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype lie in pairs along the inner index."""
    return HAS_PAIRS and dtype == torch.bfloat16


@intrinsic
def width_of(_context, w):
    """Inner indices of one link where `w` points to weights: 2 if they lie in pairs."""
    width = 2 if HAS_PAIRS and w.is_bfloat16 else 1

    def emit(context, builder, signature, arguments):
        return number(_I64, width)

    return types.int64(w), emit


@intrinsic
def size_of(_context, w):
    """Bytes of one number where `w` points."""

    def emit(context, builder, signature, arguments):
        return number(_I64, w.element.size)

    return types.int64(w), emit


@intrinsic
def like(_context, address, w):
    """The pointer to numbers as `w` points to, at an address."""

    def emit(context, builder, signature, arguments):
        return arguments[0]

    return w(types.int64, w), emit


def _tiles(num_vectors: int, num_lines: int) -> Callable:
    """Products of 1..TILE_ROWS rows and `num_vectors` vectors of features, each number of rows with
    registers of its own. Each link asks for `num_lines` lines from `ahead` on, the next one for those
    `ahead_step` numbers on."""

    @intrinsic
    def tiles(
        _context, num_rows, x, x_stride, w, w_step, w_stride, ahead, ahead_step, count, init,
        init_stride, y, y_stride,
    ):  # fmt: skip
        kinds = (x, w, init, y)

        def emit(context, builder, signature, arguments):
            end = builder.append_basic_block("end")
            choice = builder.switch(arguments[0], end)
            for rows in range(1, TILE_ROWS + 1):
                block = builder.append_basic_block(f"rows_{rows}")
                choice.add_case(number(_I64, rows), block)
                builder.position_at_end(block)
                _emit_tile(builder, rows, num_vectors, num_lines, kinds, arguments[1:])
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        whole = types.int64
        signature = types.void(
            whole, x, whole, w, whole, whole, w, whole, whole, init, whole, y, whole
        )
        return signature, emit

    return tiles


def _emit_tile(
    builder: Any,
    num_rows: int,
    num_vectors: int,
    num_lines: int,
    kinds: tuple[PointerType, ...],
    arguments: Any,
) -> None:
    x, w, init, y = kinds
    x_at, x_by, w_at, w_by, w_next, ahead_at, ahead_by, links, init_at, init_by, y_at, y_by = (
        arguments
    )

    def address(start: Any, index: Any, stride: Any, size: int) -> Any:
        offset = builder.mul(builder.mul(index, stride), number(_I64, size))
        return builder.add(start, offset)

    rows = [number(_I64, row) for row in range(num_rows)]
    vectors = [number(_I64, vector) for vector in range(num_vectors)]
    along = [number(_I64, LANES * vector * init.element.size) for vector in range(num_vectors)]
    x_rows = [address(x_at, row, x_by, x.element.size) for row in rows]
    w_vectors = [address(w_at, vector, w_next, w.element.size) for vector in vectors]
    totals = [
        emit_load(
            builder,
            builder.add(address(init_at, row, init_by, init.element.size), offset),
            init,
        )
        for row in rows
        for offset in along
    ]
    zero = ir.Constant(totals[0].type, None)
    first, chain, behind_chain, behind = (
        builder.append_basic_block(name) for name in ("first", "chain", "total", "store")
    )
    before = builder.block
    builder.branch(first)

    builder.position_at_end(first)
    start = _phi(builder, number(_I64, 0), before)
    totals = [_phi(builder, total, before) for total in totals]
    full_end = builder.add(start, number(_I64, CHAIN))
    is_short = builder.icmp_signed("<", links, full_end)
    end = builder.select(is_short, links, full_end)
    builder.branch(chain)

    builder.position_at_end(chain)
    link = _phi(builder, start, first)
    sums = [_phi(builder, zero, first) for _ in totals]
    w_offset = builder.mul(builder.mul(link, w_by), number(_I64, w.element.size))
    ahead = address(ahead_at, link, ahead_by, w.element.size)
    for line in range(num_lines):
        emit_ask(builder, builder.add(ahead, number(_I64, LINE * line)))
    weights = [builder.add(vector, w_offset) for vector in w_vectors]
    added = _add_link(builder, x, x_rows, w, weights, link, sums)
    following = builder.add(link, number(_I64, 1))
    for phi, value in zip([link, *sums], [following, *added], strict=True):
        phi.add_incoming(value, chain)
    is_inside = builder.icmp_signed("<", following, end)
    builder.cbranch(is_inside, chain, behind_chain)

    builder.position_at_end(behind_chain)
    results = [builder.fadd(*each) for each in zip(totals, added, strict=True)]
    for phi, value in zip([start, *totals], [end, *results], strict=True):
        phi.add_incoming(value, behind_chain)
    builder.cbranch(builder.icmp_signed("<", end, links), first, behind)

    builder.position_at_end(behind)
    for place, value in enumerate(results):
        row, vector = divmod(place, num_vectors)
        offset = number(_I64, LANES * vector * y.element.size)
        target = builder.add(address(y_at, rows[row], y_by, y.element.size), offset)
        emit_store(builder, target, y, value)


def _phi(builder: Any, value: Any, block: Any) -> Any:
    """A value that a loop changes, before the first time around."""
    phi = builder.phi(value.type)
    phi.add_incoming(value, block)
    return phi


def _add_link(
    builder: Any,
    x: PointerType,
    x_rows: list[Any],
    w: PointerType,
    weights: list[Any],
    link: Any,
    sums: list[Any],
) -> list[Any]:
    """All sums, row by row, with one more product, or pair of products, each."""
    in_pairs = HAS_PAIRS and x.is_bfloat16 and w.is_bfloat16
    width = 2 if in_pairs else 1
    x_offset = builder.mul(link, number(_I64, width * x.element.size))
    inputs = [builder.add(start, x_offset) for start in x_rows]
    if in_pairs:
        loaded = [_load_pairs(builder, start, LANES, w.element.size) for start in weights]
        spread = [_load_pairs(builder, start, 1, x.element.size) for start in inputs]
        kinds = [sums[0].type, loaded[0].type, loaded[0].type]
        multiply_pairs = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(sums[0].type, kinds),
            "llvm.x86.avx512bf16.dpbf16ps.512",
        )

        def add(each: Any, value: Any, weight: Any) -> Any:
            return builder.call(multiply_pairs, [each, value, weight])
    else:
        loaded = [emit_load(builder, start, w) for start in weights]
        spread = [broadcast(builder, emit_load(builder, start, x, 0)) for start in inputs]

        def add(each: Any, value: Any, weight: Any) -> Any:
            return emit_fma(builder, value, weight, each)

    products = [(value, weight) for value in spread for weight in loaded]
    return [add(each, *product) for each, product in zip(sums, products, strict=True)]


def _load_pairs(builder: Any, address: Any, count: int, alignment: int) -> Any:
    """LANES pairs of bfloat16: as many from memory, or one for all lanes."""
    kind = ir.VectorType(_I32, LANES) if count == LANES else _I32
    loaded = builder.load(pointer_to(builder, address, kind))
    loaded.align = alignment
    vector = loaded if count == LANES else broadcast(builder, loaded)
    return builder.bitcast(vector, ir.VectorType(_BFloat(), 2 * LANES))


# While vectors of features are in use those behind them come from memory, in even parts over the passes
# of rows: where there is one pass four lines a link, where there are two or three passes two lines.
_tiles_of_one_pass = _tiles(TILE_VECTORS, 4)
_tiles_of_few_passes = _tiles(TILE_VECTORS, 2)
_tiles_of_many_passes = _tiles(TILE_VECTORS, 1)
_narrow_tiles = _tiles(1, 1)
_near_tiles = _tiles(TILE_VECTORS, 1)
_narrow_near_tiles = _tiles(1, 1)


@kernel
def multiply(
    x, x_stride, num_rows, w, w_step, w_stride, num_vectors, count, init, init_stride, y, y_stride,
    following,
):  # fmt: skip
    """y[r, f] = init[r, f] + sum over k of x[r, k] * w[k, f], rounded once, f < LANES * num_vectors.

    All but counts are pointers and strides in numbers: rows of x, init and y are `*_stride` apart; the
    vectors of w for the next inner index (or pair of them) are `w_step` on, those of the next LANES
    features `w_stride`. `count` is the number of links of a chain, at least 1. From `following` on lie
    the weights that are needed next; as many of them as one group of vectors are asked for.
    """
    passes = -(-num_rows // TILE_ROWS)
    step = TILE_VECTORS * w_step // passes
    vector = 0
    while vector < num_vectors:
        width = TILE_VECTORS if num_vectors - vector >= TILE_VECTORS else 1
        weights = w + vector * w_stride
        ahead = weights + width * w_stride if vector + width < num_vectors else following
        row = 0
        for number_of_pass in range(passes):
            behind = num_rows * (number_of_pass + 1) // passes
            rows = behind - row
            at = x + row * x_stride
            start = init + (row * init_stride + vector * LANES)
            out = y + (row * y_stride + vector * LANES)
            if width == 1:
                _narrow_tiles(
                    rows, at, x_stride, weights, w_step, w_stride, ahead, w_step, count, start,
                    init_stride, out, y_stride,
                )  # fmt: skip
            elif passes == 1:
                _tiles_of_one_pass(
                    rows, at, x_stride, weights, w_step, w_stride, ahead, step, count, start,
                    init_stride, out, y_stride,
                )  # fmt: skip
            elif passes <= 3:
                _tiles_of_few_passes(
                    rows, at, x_stride, weights, w_step, w_stride, ahead, step, count, start,
                    init_stride, out, y_stride,
                )  # fmt: skip
            else:
                _tiles_of_many_passes(
                    rows, at, x_stride, weights, w_step, w_stride, ahead, step, count, start,
                    init_stride, out, y_stride,
                )  # fmt: skip
            ahead = ahead + count * step
            row = behind
        vector += width


@kernel
def multiply_near(
    x, x_stride, num_rows, w, w_step, w_stride, num_vectors, count, init, init_stride, y, y_stride,
    ahead, end,
):  # fmt: skip
    """`multiply` for at most TILE_ROWS rows and a `w` that is in the cache already. Meanwhile lines of
    memory from address `ahead` to `end` are asked for, one a link; returns the next `ahead`."""
    vector = 0
    while vector < num_vectors:
        at, start, out = w + vector * w_stride, init + vector * LANES, y + vector * LANES
        asked, step = at, 0
        if ahead + count * LINE <= end:
            asked, step = like(ahead, w), LINE // size_of(w)
            ahead += count * LINE
        if num_vectors - vector >= TILE_VECTORS:
            _near_tiles(
                num_rows, x, x_stride, at, w_step, w_stride, asked, step, count, start, init_stride,
                out, y_stride,
            )  # fmt: skip
            vector += TILE_VECTORS
        else:
            _narrow_near_tiles(
                num_rows, x, x_stride, at, w_step, w_stride, asked, step, count, start, init_stride,
                out, y_stride,
            )  # fmt: skip
            vector += 1
    return ahead
