"""Vectors of sixteen numbers, for kernels that Numba compiles for a CPU.

Numba compiles scalar Python; this adds pointers to numbers in memory and vectors in registers, so that
a kernel says itself in which order it adds. Sixteen-bit numbers are computed in float32 and rounded to
the nearest when stored, ties to even. No operation is reordered or contracted, so a lane's bits depend
on what the kernel says and on nothing else. Knows no kernel.

`load`, `store`, `fma` and so on can be called from compiled functions only.
"""

import hashlib
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import (
    NativeValue,
    intrinsic,
    models,
    overload,
    register_model,
    unbox,
)

LANES = 16
IS_X86 = binding.get_process_triple().startswith(("x86_64", "i686"))

_I16, _I32, _I64 = (ir.IntType(bits) for bits in (16, 32, 64))
_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()


class Element(NamedTuple):
    """How a number lies in memory, and the type that it is computed in."""

    stored: ir.Type
    size: int
    wide: types.Type
    llvm: ir.Type


ELEMENTS = {
    "bfloat16": Element(_I16, 2, types.float32, _FLOAT),
    "float16": Element(ir.HalfType(), 2, types.float32, _FLOAT),
    "float32": Element(_FLOAT, 4, types.float32, _FLOAT),
    "float64": Element(_DOUBLE, 8, types.float64, _DOUBLE),
}


def _digest_of_sources() -> str:
    """Of all that is compiled: Numba's cache of compiled functions sees a change only in the file of
    the function itself, not in those that it calls."""
    package = Path(__file__).parent.parent
    names = ("kernels/simd.py", "kernels/team.py", "kernels/tile.py")
    paths = [package / name for name in names]
    paths += sorted(package.glob("kernels/*_numba.py")) + sorted(package.glob("models/*_numba.py"))
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_SOURCES = _digest_of_sources()


class TagType(types.Type):
    """The type of a tag; it is part of what a compiled function is kept under."""

    def __init__(self, element_name: str, sources: str = _SOURCES) -> None:
        self.element_name = element_name
        super().__init__(f"Tag({element_name}, {sources})")

    @property
    def element(self) -> Element:
        return ELEMENTS[self.element_name]


class Tag:
    """An argument that says which numbers a kernel is to be compiled for. It has no value."""

    def __init__(self, element_name: str) -> None:
        self._numba_type_ = TagType(element_name)


TAGS = {getattr(torch, name): Tag(name) for name in ELEMENTS}


def whole_numbers(tensor: torch.Tensor) -> np.ndarray:
    """An int tensor on a CPU as the one kind of array that kernels are compiled for."""
    return tensor.to(torch.int64).contiguous().numpy()


# Of functions that compiled functions call: without Python's exceptions, for a thread that raised one
# would leave the others waiting.
kernel = njit(nogil=True, error_model="numpy")


def entry(function: Callable) -> Callable:
    """A compiled function that Python calls; kept on disk, where there is a place for it."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # no folder can be written
        return kernel(function)


class PointerType(types.Type):
    """The address of a number of the element that a tag stands for."""

    def __init__(self, tag: TagType) -> None:
        self.tag = tag
        super().__init__(f"Pointer({tag})")

    @property
    def element(self) -> Element:
        return self.tag.element

    @property
    def is_bfloat16(self) -> bool:
        return self.tag.element_name == "bfloat16"


class VectorType(types.Type):
    """LANES numbers, float32 or float64."""

    def __init__(self, wide: types.Type) -> None:
        self.wide = wide
        super().__init__(f"Vector({wide})")

    @property
    def llvm(self) -> ir.Type:
        return _DOUBLE if self.wide == types.float64 else _FLOAT


register_model(TagType)(models.OpaqueModel)


@unbox(TagType)
def _unbox_tag(_kind, _value, unboxing):
    return NativeValue(unboxing.context.get_dummy_value())


@register_model(PointerType)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, of: PointerType) -> None:
        super().__init__(manager, of, _I64)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, of: VectorType) -> None:
        super().__init__(manager, of, ir.VectorType(of.llvm, LANES))


def lanes_of(value: ir.Type | Any, count: int = LANES) -> Any:
    """The LLVM type of a vector, or the constant vector, of one type or value."""
    if isinstance(value, ir.Type):
        return ir.VectorType(value, count)
    return ir.Constant(ir.VectorType(value.type, count), [value.constant] * count)


def number(kind: ir.Type, value: float) -> ir.Constant:
    """An LLVM constant; of a float it is the nearest that the type holds."""
    if isinstance(kind, ir.FloatType):
        value = float(np.float32(value))
    return ir.Constant(kind, value)


def broadcast(builder: Any, scalar: Any, count: int = LANES) -> Any:
    """A vector whose lanes are all this LLVM value."""
    vector = ir.VectorType(scalar.type, count)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, number(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, count), [0] * count)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def pointer_to(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, ir.PointerType(kind))


def emit_load(builder: Any, address: Any, kind: PointerType, count: int = LANES) -> Any:
    """LLVM code that loads `count` numbers and widens them; a count of 0 loads a scalar."""
    element = kind.element

    def shape(number: ir.Type) -> ir.Type:
        return ir.VectorType(number, count) if count else number

    loaded = builder.load(pointer_to(builder, address, shape(element.stored)))
    loaded.align = element.size
    if kind.is_bfloat16:
        wide = builder.zext(loaded, shape(_I32))
        shift = lanes_of(number(_I32, 16), count) if count else number(_I32, 16)
        return builder.bitcast(builder.shl(wide, shift), shape(_FLOAT))
    return loaded if element.stored == element.llvm else builder.fpext(loaded, shape(element.llvm))


def emit_store(builder: Any, address: Any, kind: PointerType, vector: Any) -> None:
    """LLVM code that rounds a vector and stores it."""
    element, count = kind.element, vector.type.count
    if kind.is_bfloat16:
        integers = ir.VectorType(_I32, count)

        def constant(value: int) -> Any:
            return lanes_of(number(_I32, value), count)

        bits = builder.bitcast(vector, integers)
        odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
        rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", vector, vector)
        rounded = builder.select(is_nan, constant(0x7FC00000), rounded)
        vector = builder.trunc(builder.lshr(rounded, constant(16)), ir.VectorType(_I16, count))
    elif element.stored != element.llvm:
        vector = builder.fptrunc(vector, ir.VectorType(element.stored, count))
    stored = builder.store(vector, pointer_to(builder, address, vector.type))
    stored.align = element.size


@intrinsic
def pointer(_context, address, tag):
    """The pointer to numbers as `tag` stands for, at an address."""

    def emit(_, builder, signature, arguments):
        return arguments[0]

    return PointerType(tag)(types.int64, tag), emit


@intrinsic
def _advance(_context, start, count):
    def emit(_, builder, signature, arguments):
        offset = builder.mul(arguments[1], number(_I64, start.element.size))
        return builder.add(arguments[0], offset)

    return start(start, types.int64), emit


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
def splat(_context, value):
    """A vector of one float32 or float64."""

    def emit(_, builder, signature, arguments):
        return broadcast(builder, arguments[0])

    return VectorType(value)(value), emit


@intrinsic
def _same(_context, like, value):
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


def emit_fma(builder: Any, first: Any, second: Any, third: Any) -> Any:
    return _call(builder, "llvm.fma", first, second, third)


def _call(builder: Any, name: str, *vectors: Any) -> Any:
    """One of LLVM's functions of vectors of one type."""
    kind = vectors[0].type
    suffix = "f64" if isinstance(kind.element, ir.DoubleType) else "f32"
    signature = ir.FunctionType(kind, [kind] * len(vectors))
    full_name = f"{name}.v{kind.count}{suffix}"
    function = cgutils.get_or_insert_function(builder.module, signature, full_name)
    return builder.call(function, vectors)


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
        places = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
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
                        ir.Constant(ir.VectorType(_I32, half), list(range(start, start + half))),
                    )
                    for start in (0, half)
                ]
                value = emit_pair(builder, *parts)
            return builder.extract_element(value, number(_I32, 0))

        return vector.wide(vector), emit

    return operation


total = _fold(lambda builder, first, second: builder.fadd(first, second))
largest = _fold(
    lambda builder, first, second: builder.select(
        builder.fcmp_ordered(">", first, second), first, second
    )
)


@intrinsic
def exp(_context, vector):
    """e to the power of each lane, within two units in the last place."""

    def emit(context, builder, signature, arguments):
        (x,) = arguments
        if vector.wide == types.float64:
            return _call(builder, "llvm.exp", x)
        return _emit_exp(builder, x)

    return vector(vector), emit


def _emit_exp(builder: Any, x: Any) -> Any:
    """exp(x) = 2^n * exp(r) with n whole and r within half of ln 2, by r's power series."""

    def constant(value: float) -> Any:
        return lanes_of(number(_FLOAT, value))

    least, most = constant(-104.0), constant(89.0)
    bounded = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    bounded = builder.select(builder.fcmp_ordered(">", bounded, most), most, bounded)
    whole = _call(builder, "llvm.rint", builder.fmul(bounded, constant(math.log2(math.e))))
    # ln 2 in two parts; the first has so few digits that n times it is exact.
    high = math.floor(math.log(2.0) * 2**15) / 2**15
    minus_whole = builder.fneg(whole)
    rest = emit_fma(builder, minus_whole, constant(high), bounded)
    rest = emit_fma(builder, minus_whole, constant(math.log(2.0) - high), rest)
    series = constant(1.0 / math.factorial(7))
    for power in range(6, -1, -1):
        series = emit_fma(builder, series, rest, constant(1.0 / math.factorial(power)))
    # 2^n in two factors, for its exponent may lie beyond those of float32.
    integers = ir.VectorType(_I32, LANES)
    exponent = builder.fptosi(whole, integers)
    half = builder.ashr(exponent, lanes_of(number(_I32, 1)))
    for part in (half, builder.sub(exponent, half)):
        biased = builder.add(part, lanes_of(number(_I32, 127)))
        scale = builder.bitcast(builder.shl(biased, lanes_of(number(_I32, 23))), x.type)
        series = builder.fmul(series, scale)
    series = builder.select(builder.fcmp_ordered("<", x, least), constant(0.0), series)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, series)


@kernel
def same(like, value):
    """A vector of the kind of `like`, all lanes `value`."""
    return _same(like, value)


@intrinsic
def transpose(_context, source, source_stride, target, target_stride):
    """Load a square of LANES by LANES numbers, rows `source_stride` numbers apart, and store it
    transposed. If source and target are of bfloat16, pairs of neighbours stay together."""
    of_pairs = source.is_bfloat16 and target.is_bfloat16

    def emit(context, builder, signature, arguments):
        start, stride, to, to_stride = arguments
        element = source.element
        step = builder.mul(stride, number(_I64, element.size))
        rows = []
        for row in range(LANES):
            address = builder.add(start, builder.mul(step, number(_I64, row)))
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
        masks = [ir.Constant(ir.VectorType(_I32, LANES), mix) for mix in mixes]
        for _ in range(LANES.bit_length() - 1):
            rows = [
                builder.shuffle_vector(rows[row], rows[row + half], mask)
                for row in range(half)
                for mask in masks
            ]
        to_step = builder.mul(to_stride, number(_I64, target.element.size))
        for row, vector in enumerate(rows):
            address = builder.add(to, builder.mul(to_step, number(_I64, row)))
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
            half = builder.load(pointer_to(builder, address, ir.VectorType(_I16, LANES)))
            half.align = 2
            halves.append(builder.zext(half, ir.VectorType(_I32, LANES)))
        high = builder.shl(halves[1], lanes_of(number(_I32, 16)))
        _store_words(builder, to, builder.or_(halves[0], high))
        return context.get_dummy_value()

    return types.void(first, second, target), emit


def _load_words(builder: Any, address: Any) -> Any:
    loaded = builder.load(pointer_to(builder, address, ir.VectorType(_I32, LANES)))
    loaded.align = 2
    return loaded


def _store_words(builder: Any, address: Any, words: Any) -> None:
    builder.store(words, pointer_to(builder, address, words.type)).align = 2
