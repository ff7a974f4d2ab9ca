"""Vectors of sixteen numbers, for kernels that Numba compiles for a CPU.

Numba compiles scalar Python; this adds pointers to numbers in memory and vectors in registers, so that
a kernel says itself in which order it adds. Sixteen-bit numbers are computed in float32 and rounded to
the nearest when stored, ties to even. No operation is reordered or contracted, so a lane's bits depend
on what the kernel says and on nothing else. Knows no kernel.

`load`, `store`, `fma` and so on can be called from compiled functions only.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from lookahead.kernels.simd_types import (
    I16,
    I32,
    I64,
    LANES,
    PointerType,
    VectorType,
    broadcast,
    emit_ask,
    emit_fma,
    emit_load,
    emit_store,
    lanes_of,
    number,
    pointer_to,
)


@intrinsic
def pointer(_context, address, tag):
    """The pointer to numbers as `tag` stands for, at an address."""

    def emit(_, builder, signature, arguments):
        return arguments[0]

    return PointerType(tag)(types.int64, tag), emit


@intrinsic
def _advance(_context, start, count):
    def emit(_, builder, signature, arguments):
        offset = builder.mul(arguments[1], number(I64, start.element.size))
        return builder.add(arguments[0], offset)

    return start(start, types.int64), emit


@intrinsic
def ask(_context, address):
    """Ask for the line of memory at an address, to be in the cache when it is needed."""

    def emit(context, builder, signature, arguments):
        emit_ask(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def load(_context, start):
    """LANES numbers from a pointer on."""

    def emit(_, builder, signature, arguments):
        return emit_load(builder, arguments[0], start)

    return VectorType(start.element.wide)(start), emit


@intrinsic
def store(_context, start, vector):
    """Round a vector and write it from a pointer on."""

    def emit(context, builder, signature, arguments):
        emit_store(builder, arguments[0], start, arguments[1])
        return context.get_dummy_value()

    return types.void(start, vector), emit


@intrinsic
def load_one(_context, start):
    """The number at a pointer, widened."""

    def emit(_, builder, signature, arguments):
        return emit_load(builder, arguments[0], start, 0)

    return start.element.wide(start), emit


@intrinsic
def store_one(_context, start, value):
    """Round a number and write it to a pointer."""

    def emit(context, builder, signature, arguments):
        emit_store(builder, arguments[0], start, broadcast(builder, arguments[1], 1))
        return context.get_dummy_value()

    return types.void(start, start.element.wide), emit


@intrinsic
def copy_pair(_context, source, target):
    """Copy two bfloat16 numbers as they are."""

    def emit(context, builder, signature, arguments):
        start, to = (pointer_to(builder, address, I32) for address in arguments)
        loaded = builder.load(start)
        stored = builder.store(loaded, to)
        loaded.align = stored.align = source.element.size
        return context.get_dummy_value()

    return types.void(source, target), emit


@intrinsic
def splat(_context, value):
    """A vector of one float32 or float64."""

    def emit(_, builder, signature, arguments):
        return broadcast(builder, arguments[0])

    return VectorType(value)(value), emit


@intrinsic
def same(_context, like, value):
    """A vector of the kind of `like`, all lanes `value`."""

    def emit(context, builder, signature, arguments):
        scalar = context.cast(builder, arguments[1], signature.args[1], like.wide)
        return broadcast(builder, scalar)

    return like(like, types.float64), emit


@intrinsic
def zeros(_context, like):
    """A vector of zeros, as wide as the numbers of a pointer are computed."""

    def emit(_, builder, signature, arguments):
        return lanes_of(number(like.element.llvm, 0.0))

    return VectorType(like.element.wide)(like), emit


@intrinsic
def fma(_context, first, second, third):
    """first * second + third, rounded once."""

    def emit(_, builder, signature, arguments):
        return emit_fma(builder, *arguments)

    return first(first, second, third), emit


def _binary(method: str) -> Callable:
    @intrinsic
    def operation(_context, first, second):
        def emit(_, builder, signature, arguments):
            return getattr(builder, method)(*arguments)

        return first(first, second), emit

    return operation


def _overload(which: Callable, operation: Callable) -> None:
    @overload(which)
    def implement(first, second):
        if isinstance(first, VectorType) and first == second:
            return lambda first, second: operation(first, second)
        return None


for _which, _method in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _overload(_which, _binary(_method))


@overload(operator.add)
def _add_to_pointer(start, count):
    if isinstance(start, PointerType) and isinstance(count, types.Integer):
        return lambda start, count: _advance(start, count)
    return None


@intrinsic
def larger(_context, first, second):
    """The larger of two vectors' lanes; `second` where either is not a number."""

    def emit(_, builder, signature, arguments):
        is_larger = builder.fcmp_ordered(">", *arguments)
        return builder.select(is_larger, *arguments)

    return first(first, second), emit


@intrinsic
def keep_first(_context, vector, count, other):
    """The first `count` lanes of a vector, the others from `other`."""

    def emit(_, builder, signature, arguments):
        places = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
        is_kept = builder.icmp_signed("<", places, broadcast(builder, arguments[1]))
        return builder.select(is_kept, arguments[0], arguments[2])

    return vector(vector, types.int64, vector), emit


@intrinsic
def finite_or_zero(_context, vector):
    """The lanes that are finite numbers, 0 in the others."""

    def emit(_, builder, signature, arguments):
        (value,) = arguments
        rest = builder.fsub(value, value)
        is_finite = builder.fcmp_ordered("ord", rest, rest)
        return builder.select(is_finite, value, ir.Constant(value.type, None))

    return vector(vector), emit


@intrinsic
def not_a_number(_context, vector):
    """1 in the lanes that are not a number, 0 in the others."""

    def emit(_, builder, signature, arguments):
        (value,) = arguments
        is_nan = builder.fcmp_unordered("uno", value, value)
        return builder.uitofp(is_nan, value.type)

    return vector(vector), emit


def _fold(emit_pair: Callable) -> Callable:
    """Halves of a vector folded on each other until one number is left."""

    @intrinsic
    def operation(_context, vector):
        def emit(_, builder, signature, arguments):
            (value,) = arguments
            while value.type.count > 1:
                half = value.type.count // 2
                parts = [
                    builder.shuffle_vector(
                        value,
                        value,
                        ir.Constant(ir.VectorType(I32, half), list(range(start, start + half))),
                    )
                    for start in (0, half)
                ]
                value = emit_pair(builder, *parts)
            return builder.extract_element(value, number(I32, 0))

        return vector.wide(vector), emit

    return operation


total = _fold(lambda builder, first, second: builder.fadd(first, second))
largest = _fold(
    lambda builder, first, second: builder.select(
        builder.fcmp_ordered(">", first, second), first, second
    )
)


@intrinsic
def transpose(_context, source, source_stride, target, target_stride):
    """Load a square of LANES by LANES numbers, rows `source_stride` numbers apart, and store it
    transposed. If source and target are of bfloat16, pairs of neighbours stay together."""
    of_pairs = source.is_bfloat16 and target.is_bfloat16

    def emit(context, builder, signature, arguments):
        start, stride, to, to_stride = arguments
        element = source.element
        step = builder.mul(stride, number(I64, element.size))
        rows = []
        for row in range(LANES):
            address = builder.add(start, builder.mul(step, number(I64, row)))
            if of_pairs:
                rows.append(_load_words(builder, address))
            else:
                rows.append(emit_load(builder, address, source))
        half = LANES // 2
        # A perfect shuffle of rows i and i + LANES / 2, log2(LANES) times over, transposes.
        mixes = [
            [place // 2 + (place % 2) * LANES + side * half for place in range(LANES)]
            for side in (0, 1)
        ]
        masks = [ir.Constant(ir.VectorType(I32, LANES), mix) for mix in mixes]
        for _ in range(LANES.bit_length() - 1):
            rows = [
                builder.shuffle_vector(rows[row], rows[row + half], mask)
                for row in range(half)
                for mask in masks
            ]
        to_step = builder.mul(to_stride, number(I64, target.element.size))
        for row, vector in enumerate(rows):
            address = builder.add(to, builder.mul(to_step, number(I64, row)))
            if of_pairs:
                _store_words(builder, address, vector)
            else:
                emit_store(builder, address, target, vector)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), emit


@intrinsic
def join(_context, first, second, target):
    """Copy LANES numbers from `first` on; to a target of bfloat16 LANES pairs, each a number from
    `first` on and its neighbour from `second` on."""

    def emit(context, builder, signature, arguments):
        start, other, to = arguments
        if not target.is_bfloat16:
            emit_store(builder, to, target, emit_load(builder, start, first))
            return context.get_dummy_value()
        halves = []
        for address in (start, other):
            half = builder.load(pointer_to(builder, address, ir.VectorType(I16, LANES)))
            half.align = 2
            halves.append(builder.zext(half, ir.VectorType(I32, LANES)))
        high = builder.shl(halves[1], lanes_of(number(I32, 16)))
        _store_words(builder, to, builder.or_(halves[0], high))
        return context.get_dummy_value()

    return types.void(first, second, target), emit


def _load_words(builder: Any, address: Any) -> Any:
    loaded = builder.load(pointer_to(builder, address, ir.VectorType(I32, LANES)))
    loaded.align = 2
    return loaded


def _store_words(builder: Any, address: Any, words: Any) -> None:
    builder.store(words, pointer_to(builder, address, words.type)).align = 2
