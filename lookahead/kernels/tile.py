"""The innermost loop of every product on a CPU: a tile of sums held in registers.

`multiply` gives y = x @ w + init for rows of x and features of w. Each output is a sum of chains of
CHAIN multiply-adds in order of its inner index, whatever rows and features run beside it. Where the
processor multiplies pairs of bfloat16 (AVX512-BF16), two neighbours of the inner index are one link.
"""

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic

from lookahead.kernels.simd import (
    LANES,
    PointerType,
    broadcast,
    emit_fma,
    emit_load,
    emit_store,
    number,
    pointer_to,
)


def _target_features() -> set[str]:
    """What Numba compiles for: this processor, unless it was told of another."""
    if config.CPU_FEATURES is not None:
        told = config.CPU_FEATURES.split(",")
        return {feature[1:] for feature in told if feature.startswith("+")}
    return {name for name, is_there in binding.get_host_cpu_features().items() if is_there}


HAS_PAIRS = "avx512bf16" in _target_features()
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


def _tile(num_rows: int, num_vectors: int) -> Callable:
    """The product of `num_rows` rows and `num_vectors` vectors of features."""

    @intrinsic
    def tile(
        _context, x, x_stride, w, w_step, w_stride, ahead, count, init, init_stride, y, y_stride
    ):
        in_pairs = HAS_PAIRS and x.is_bfloat16 and w.is_bfloat16

        def emit(context, builder, signature, arguments):
            x_at, x_by, w_at, w_by, w_next, ahead_at, links, init_at, init_by, y_at, y_by = (
                arguments
            )

            def address(start: Any, index: Any, stride: Any, size: int) -> Any:
                offset = builder.mul(builder.mul(index, stride), number(_I64, size))
                return builder.add(start, offset)

            rows = [number(_I64, row) for row in range(num_rows)]
            vectors = [number(_I64, vector) for vector in range(num_vectors)]
            along = [
                number(_I64, LANES * vector * init.element.size) for vector in range(num_vectors)
            ]
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
            _prefetch(builder, builder.add(ahead_at, w_offset))
            weights = [builder.add(vector, w_offset) for vector in w_vectors]
            added = _add_link(builder, in_pairs, x, x_rows, w, weights, link, sums)
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
            for number_of_sum, value in enumerate(results):
                row, vector = divmod(number_of_sum, num_vectors)
                offset = number(_I64, LANES * vector * y.element.size)
                target = builder.add(address(y_at, rows[row], y_by, y.element.size), offset)
                emit_store(builder, target, y, value)
            return context.get_dummy_value()

        whole = types.int64
        signature = types.void(x, whole, w, whole, whole, w, whole, init, whole, y, whole)
        return signature, emit

    return tile


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for a line of weights that is needed soon."""
    kinds = [ir.PointerType(ir.IntType(8)), _I32, _I32, _I32]
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0"
    )
    to_read, second_level, data = 0, 2, 1
    hints = [number(_I32, hint) for hint in (to_read, second_level, data)]
    builder.call(function, [pointer_to(builder, address, ir.IntType(8)), *hints])


def _phi(builder: Any, value: Any, block: Any) -> Any:
    """A value that a loop changes, before the first time around."""
    phi = builder.phi(value.type)
    phi.add_incoming(value, block)
    return phi


def _add_link(
    builder: Any,
    in_pairs: bool,
    x: PointerType,
    x_rows: list[Any],
    w: PointerType,
    weights: list[Any],
    link: Any,
    sums: list[Any],
) -> list[Any]:
    """All sums, row by row, with one more product, or pair of products, each."""
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


def _strip(num_vectors: int) -> Callable:
    """Tiles one below the other: any number of rows by `num_vectors` vectors of features."""
    tiles = [_tile(rows, num_vectors) for rows in range(1, TILE_ROWS + 1)]
    tile_1, tile_2, *more = tiles
    tile_3, tile_4, tile_5, tile_6 = more or (tile_2, tile_2, tile_2, tile_2)

    @njit(nogil=True)
    def strip(x, x_stride, num_rows, w, w_step, w_stride, count, init, init_stride, y, y_stride):
        row, vector = 0, 0
        while row < num_rows:
            rows = min(num_rows - row, TILE_ROWS)
            # While the first vectors of features are in use, those behind them come from memory.
            ahead = w + (num_vectors + vector) * w_stride
            vector = (vector + 1) % num_vectors
            a, i, b = x + row * x_stride, init + row * init_stride, y + row * y_stride
            if rows == 1:
                tile_1(a, x_stride, w, w_step, w_stride, ahead, count, i, init_stride, b, y_stride)
            elif rows == 2:
                tile_2(a, x_stride, w, w_step, w_stride, ahead, count, i, init_stride, b, y_stride)
            elif rows == 3:
                tile_3(a, x_stride, w, w_step, w_stride, ahead, count, i, init_stride, b, y_stride)
            elif rows == 4:
                tile_4(a, x_stride, w, w_step, w_stride, ahead, count, i, init_stride, b, y_stride)
            elif rows == 5:
                tile_5(a, x_stride, w, w_step, w_stride, ahead, count, i, init_stride, b, y_stride)
            else:
                tile_6(a, x_stride, w, w_step, w_stride, ahead, count, i, init_stride, b, y_stride)
            row += rows

    return strip


_wide_strip = _strip(TILE_VECTORS)
_narrow_strip = _strip(1)


@njit(nogil=True)
def multiply(
    x, x_stride, num_rows, w, w_step, w_stride, num_vectors, count, init, init_stride, y, y_stride
):
    """y[r, f] = init[r, f] + sum over k of x[r, k] * w[k, f], rounded once, f < LANES * num_vectors.

    All but counts are pointers and strides in numbers: rows of x, init and y are `*_stride` apart; the
    vectors of w for the next inner index (or pair of them) are `w_step` on, those of the next LANES
    features `w_stride`. `count` is the number of links of a chain, at least 1.
    """
    vector = 0
    while vector + TILE_VECTORS <= num_vectors:
        _wide_strip(
            x, x_stride, num_rows, w + vector * w_stride, w_step, w_stride, count,
            init + vector * LANES, init_stride, y + vector * LANES, y_stride,
        )  # fmt: skip
        vector += TILE_VECTORS
    while vector < num_vectors:
        _narrow_strip(
            x, x_stride, num_rows, w + vector * w_stride, w_step, w_stride, count,
            init + vector * LANES, init_stride, y + vector * LANES, y_stride,
        )  # fmt: skip
        vector += 1
