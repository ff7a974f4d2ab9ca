"""Builds the attention kernels for GPUs that need not be here and says what came out.

`build_all` asks a process of its own, because this one may hold the kernels as functions of Triton's
interpreter. That process is this file run as a program: requests come in and reports go out as JSON,
one a line. Knows no layer of a model and no chip.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lookahead.kernels.attn_mask_launch import Plan, Shape, plan, specialisation
from lookahead.kernels.attn_mask_triton import attend_tiles, merge_partials
from lookahead.kernels.tuning import Tile, choose_tile
from lookahead.layout import LookaheadLayout, RowTree

ELEMENTS = {"bf16": 2, "fp16": 2, "fp32": 4}


class BuildError(Exception):
    """The process that builds stopped; says how it ended."""


@dataclass(frozen=True)
class Request:
    """One launch, and so the binary that it needs. Without a tile it is built with the tuning table's;
    `layout` is (W, N, G)."""

    architecture: str
    element: str
    head_dim: int
    num_q_heads: int
    num_kv_heads: int
    merge: bool
    table: bool = False
    tile: Tile | None = None
    layout: tuple[int, int, int] = (15, 5, 15)

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def chosen_tile(self) -> Tile:
        itemsize = ELEMENTS[self.element]
        return self.tile or choose_tile(self.architecture, self.head_dim, itemsize)

    @property
    def plan(self) -> Plan:
        layout: RowTree = LookaheadLayout(*self.layout)
        if self.table:
            layout = RowTree(layout.parents)
        heads = (self.num_q_heads, self.head_dim, self.num_kv_heads)
        shape = Shape(1, layout.num_rows, *heads, capacity=4224, row_start=4096, longest=4096)
        return plan(shape, layout, self.table, self.chosen_tile)

    @property
    def kernel(self) -> Any:
        return merge_partials if self.merge else attend_tiles

    @property
    def numbers(self) -> dict[str, int]:
        return self.plan.merge_numbers if self.merge else self.plan.numbers

    @property
    def specialised_numbers(self) -> list[str]:
        """Run-time numbers whose values a launch would choose between binaries by."""
        parameters = {parameter.name: parameter for parameter in self.kernel.params}
        return [name for name in self.numbers if not parameters[name].do_not_specialize]

    @staticmethod
    def parse(line: str) -> "Request":
        fields = json.loads(line)
        tile = fields.pop("tile")
        return Request(**fields, tile=None if tile is None else Tile(**tile))


def table_requests(architecture: str) -> Iterator[Request]:
    """Every entry of the tuning table, heads with and without groups, closed form and path table."""
    for element in ELEMENTS:
        for head_dim in (64, 128, 256):
            for heads, use_table in (((32, 32), False), ((32, 8), False), ((28, 4), True)):
                for merge in (False, True):
                    yield Request(architecture, element, head_dim, *heads, merge, use_table)


def odd_requests(architecture: str) -> Iterator[Request]:
    """Head sizes that fill no tile and groups that are no power of two, in 16 bits."""
    for head_dim in (80, 96, 160, 192, 256):
        for heads in ((9, 3), (28, 4)):
            yield Request(architecture, "bf16", head_dim, *heads, merge=False)


def build_all(requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
    """A report for each request in order, as they come; see `describe`.

    One that cannot be built has only `error`, a line. Raises BuildError when the process ends early.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        tempfile.TemporaryFile("w+") as lines,
    ):
        lines.writelines(json.dumps(asdict(request)) + "\n" for request in requests)
        lines.seek(0)
        with subprocess.Popen(
            [sys.executable, __file__],
            env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=lines,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process:
            assert process.stdout is not None
            yield from map(json.loads, process.stdout)
        if process.returncode:
            errors.seek(0)
            raise BuildError(f"exit code {process.returncode}: {errors.read()[-2000:].strip()}")


def pointer_types(element: str, use_table: bool) -> dict[str, str]:
    """Element types of all pointer arguments of both kernels."""
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), element)
    types |= dict.fromkeys(("acc_ptr", "top_ptr", "total_ptr"), "fp32")
    types |= dict.fromkeys(("lengths_ptr", "live_ptr"), "i32")
    tables = ("path_rows_ptr", "path_firsts_ptr", "path_counts_ptr", "depths_ptr")
    return types | dict.fromkeys(tables, "i32" if use_table else "")


def target_of(architecture: str) -> GPUTarget:
    """What Triton compiles for."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


def build(request: Request) -> Any:
    """Triton's compiled kernel."""
    the_plan = request.plan
    constants = the_plan.merge_constants if request.merge else the_plan.constants
    signature, constexprs, attributes = specialisation(
        request.kernel, request.numbers, constants, pointer_types(request.element, request.table)
    )
    source = ASTSource(
        fn=request.kernel, signature=signature, constexprs=constexprs, attrs=attributes
    )
    return triton.compile(
        source,
        target=target_of(request.architecture),
        options={} if request.merge else dict(the_plan.options),
    )


def describe(built: Any) -> dict[str, Any]:
    """Registers, spills, shared memory, warps, the instructions that matter, and the digest of all."""
    report: dict[str, Any] = {
        "shared": built.metadata.shared,
        "warps": built.metadata.num_warps,
        "loads": len(re.findall(r"\btt\.load\b", built.asm["ttir"])),
    }
    if "amdgcn" in built.asm:
        text = built.asm["amdgcn"]
        report["registers"] = _number(r"\.vgpr_count:\s*(\d+)", text)
        report["spills"] = sum(
            _number(rf"\.{kind}_spill_count:\s*(\d+)", text) for kind in ("vgpr", "sgpr")
        )
        report["matrix"] = len(re.findall(r"v_mfma", text))
        report["tf32"] = text.count("xf32")
        report["digest"] = hashlib.sha256(text.encode()).hexdigest()
        return report
    text = built.asm["ptx"]
    report["digest"] = hashlib.sha256(text.encode()).hexdigest()
    report["tf32"] = text.count("tf32")
    report["matrix"] = len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", text))
    report["async_16"] = len(re.findall(r"cp\.async\.cg[^\n]*0x10", text))
    report["async_less"] = len(re.findall(r"cp\.async\.ca", text))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        usage = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    report["registers"] = _number(r"REG:(\d+)", usage)
    report["spills"] = _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage)
    return report


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in what the compiler said"
    return int(found[1])


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter has nothing to compile"
    for line in sys.stdin:
        request = Request.parse(line)
        case = asdict(request) | {
            "group": request.group,
            "tile": asdict(request.chosen_tile),
            "specialised": request.specialised_numbers,
        }
        try:
            report = describe(build(request))
        except Exception as error:  # whatever the compiler's passes raise
            report = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(case | report), flush=True)


if __name__ == "__main__":
    main()
