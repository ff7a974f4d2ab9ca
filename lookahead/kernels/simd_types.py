"""Numbers in memory and vectors in registers: the types of kernels that Numba compiles for a CPU.

Knows how LLVM loads, stores and multiplies them; what a kernel calls is in `simd.py`.
"""

import hashlib
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
    models,
    register_model,
    unbox,
)

LANES = 16
LINE = 64  # bytes that come from memory together
IS_X86 = binding.get_process_triple().startswith(("x86_64", "i686"))

I16, I32, I64 = (ir.IntType(bits) for bits in (16, 32, 64))
FLOAT, DOUBLE = ir.FloatType(), ir.DoubleType()


class Element(NamedTuple):
    """How a number lies in memory, and the type that it is computed in."""

    stored: ir.Type
    size: int
    wide: types.Type
    llvm: ir.Type


ELEMENTS = {
    "bfloat16": Element(I16, 2, types.float32, FLOAT),
    "float16": Element(ir.HalfType(), 2, types.float32, FLOAT),
    "float32": Element(FLOAT, 4, types.float32, FLOAT),
    "float64": Element(DOUBLE, 8, types.float64, DOUBLE),
}


def _digest_of_sources() -> str:
    """Of all that is compiled: Numba's cache of compiled functions sees a change only in the file of
    the function itself, not in those that it calls."""
    package = Path(__file__).parent.parent
    names = ("simd_types", "simd", "simd_exp", "team", "tile", "philox", "warpers")
    paths = [package / "kernels" / f"{name}.py" for name in names]
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
        return DOUBLE if self.wide == types.float64 else FLOAT


register_model(TagType)(models.OpaqueModel)


@unbox(TagType)
def _unbox_tag(_kind, _value, unboxing):
    return NativeValue(unboxing.context.get_dummy_value())


@register_model(PointerType)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, of: PointerType) -> None:
        super().__init__(manager, of, I64)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, of: VectorType) -> None:
        super().__init__(manager, of, ir.VectorType(of.llvm, LANES))


def lanes_of(value: ir.Constant, count: int = LANES) -> ir.Constant:
    """The constant vector whose lanes are all this value."""
    return ir.Constant(ir.VectorType(value.type, count), [value.constant] * count)


def number(kind: ir.Type, value: float) -> ir.Constant:
    """An LLVM constant; of a float it is the nearest that the type holds."""
    if isinstance(kind, ir.FloatType):
        value = float(np.float32(value))
    return ir.Constant(kind, value)


def broadcast(builder: Any, scalar: Any, count: int = LANES) -> Any:
    """A vector whose lanes are all this LLVM value."""
    vector = ir.VectorType(scalar.type, count)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, number(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, count), [0] * count)
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
        wide = builder.zext(loaded, shape(I32))
        shift = lanes_of(number(I32, 16), count) if count else number(I32, 16)
        return builder.bitcast(builder.shl(wide, shift), shape(FLOAT))
    return loaded if element.stored == element.llvm else builder.fpext(loaded, shape(element.llvm))


def emit_store(builder: Any, address: Any, kind: PointerType, vector: Any) -> None:
    """LLVM code that rounds a vector and stores it."""
    element, count = kind.element, vector.type.count
    if kind.is_bfloat16:
        integers = ir.VectorType(I32, count)

        def constant(value: int) -> Any:
            return lanes_of(number(I32, value), count)

        bits = builder.bitcast(vector, integers)
        odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
        rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", vector, vector)
        rounded = builder.select(is_nan, constant(0x7FC00000), rounded)
        vector = builder.trunc(builder.lshr(rounded, constant(16)), ir.VectorType(I16, count))
    elif element.stored != element.llvm:
        vector = builder.fptrunc(vector, ir.VectorType(element.stored, count))
    stored = builder.store(vector, pointer_to(builder, address, vector.type))
    stored.align = element.size


def emit_ask(builder: Any, address: Any) -> None:
    """LLVM code that asks for a line of memory, to be in the second-level cache when it is needed."""
    kinds = [ir.PointerType(ir.IntType(8)), I32, I32, I32]
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0"
    )
    to_read, second_level, data = 0, 2, 1
    hints = [number(I32, hint) for hint in (to_read, second_level, data)]
    builder.call(function, [pointer_to(builder, address, ir.IntType(8)), *hints])


def emit_fma(builder: Any, first: Any, second: Any, third: Any) -> Any:
    return emit_call(builder, "llvm.fma", first, second, third)


def emit_call(builder: Any, name: str, *vectors: Any) -> Any:
    """One of LLVM's functions of vectors of one type."""
    kind = vectors[0].type
    suffix = "f64" if isinstance(kind.element, ir.DoubleType) else "f32"
    signature = ir.FunctionType(kind, [kind] * len(vectors))
    full_name = f"{name}.v{kind.count}{suffix}"
    function = cgutils.get_or_insert_function(builder.module, signature, full_name)
    return builder.call(function, vectors)
