"""The exponential function for vectors of `simd.py`."""

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lookahead.kernels.simd_types import (
    FLOAT,
    I32,
    emit_call,
    emit_fma,
    lanes_of,
    number,
)

# exp(x) = 2^n * exp(r) with n whole and r within half of ln 2. ln 2 in two parts; the first has so few
# digits that n times it is exact.
_HIGH = math.floor(math.log(2.0) * 2**15) / 2**15
_LOW = math.log(2.0) - _HIGH
# Added to a small number, it leaves the nearest whole one in the last bits of the sum.
_ROUNDER = 1.5 * 2.0**23
# Below, e to that power is not worth a number with fewer digits.
_LEAST = -87.0


@intrinsic
def exp(_context, vector):
    """e to the power of each lane, within two units in the last place."""

    def emit(context, builder, signature, arguments):
        (x,) = arguments
        if vector.wide == types.float64:
            return emit_call(builder, "llvm.exp", x)
        return _emit_exp(builder, x)

    return vector(vector), emit


def _emit_exp(builder: Any, x: Any) -> Any:
    least, most = _constant(-104.0), _constant(89.0)
    bounded = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    bounded = builder.select(builder.fcmp_ordered(">", bounded, most), most, bounded)
    whole = emit_call(builder, "llvm.rint", builder.fmul(bounded, _constant(math.log2(math.e))))
    minus_whole = builder.fneg(whole)
    rest = emit_fma(builder, minus_whole, _constant(_HIGH), bounded)
    rest = emit_fma(builder, minus_whole, _constant(_LOW), rest)
    series = _emit_series(builder, rest)
    # 2^n in two factors, for its exponent may lie beyond those of float32.
    integers = ir.VectorType(I32, x.type.count)
    exponent = builder.fptosi(whole, integers)
    half = builder.ashr(exponent, lanes_of(number(I32, 1)))
    for part in (half, builder.sub(exponent, half)):
        biased = builder.add(part, lanes_of(number(I32, 127)))
        scale = builder.bitcast(builder.shl(biased, lanes_of(number(I32, 23))), x.type)
        series = builder.fmul(series, scale)
    series = builder.select(builder.fcmp_ordered("<", x, least), _constant(0.0), series)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, series)


@intrinsic
def exp_to_one(_context, vector):
    """e to the power of each lane, none of which is above 0, within two units in the last place; 0 for
    lanes below -87. Cheaper than `exp`."""

    def emit(context, builder, signature, arguments):
        (x,) = arguments
        if vector.wide == types.float64:
            return emit_call(builder, "llvm.exp", x)
        return _emit_exp_to_one(builder, x)

    return vector(vector), emit


def _constant(value: float) -> Any:
    return lanes_of(number(FLOAT, value))


def _emit_series(builder: Any, rest: Any) -> Any:
    """exp(r) by its power series."""
    series = _constant(1.0 / math.factorial(7))
    for power in range(6, -1, -1):
        series = emit_fma(builder, series, rest, _constant(1.0 / math.factorial(power)))
    return series


def _emit_exp_to_one(builder: Any, x: Any) -> Any:
    is_tiny = builder.fcmp_ordered("<", x, _constant(_LEAST))
    bounded = builder.select(is_tiny, _constant(_LEAST), x)
    shifted = emit_fma(builder, bounded, _constant(math.log2(math.e)), _constant(_ROUNDER))
    minus_whole = builder.fsub(_constant(_ROUNDER), shifted)
    rest = emit_fma(builder, minus_whole, _constant(_HIGH), bounded)
    rest = emit_fma(builder, minus_whole, _constant(_LOW), rest)
    series = _emit_series(builder, rest)
    # The sum's last bits are n; shifted into the exponent's place nothing else of it is left.
    integers = ir.VectorType(I32, x.type.count)
    exponent = builder.shl(builder.bitcast(shifted, integers), lanes_of(number(I32, 23)))
    scale = builder.bitcast(builder.add(exponent, lanes_of(number(I32, 127 << 23))), x.type)
    return builder.select(is_tiny, _constant(0.0), builder.fmul(series, scale))
