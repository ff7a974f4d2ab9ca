"""Builds the attention kernels for GPUs that are not here and prints what came out, one JSON a line.

A program of its own: the tests' process has the kernels as the interpreter's functions. Arguments:
architectures. For each, every entry of the tuning table, head layouts with and without groups, closed
form and path table.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lookahead.kernels.attn_mask_launch import Plan, Shape, plan, specialisation
from lookahead.kernels.attn_mask_triton import attend_tiles, merge_partials
from lookahead.kernels.tuning import choose_tile
from lookahead.layout import LookaheadLayout, RowTree

LAYOUT = LookaheadLayout(15, 5, 15)
ELEMENTS = {"bf16": 2, "fp16": 2, "fp32": 4}


def pointer_types(element: str, use_table: bool) -> dict[str, str]:
    """Element types of all pointer arguments of both kernels."""
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), element)
    types |= dict.fromkeys(("acc_ptr", "top_ptr", "total_ptr"), "fp32")
    types |= dict.fromkeys(("lengths_ptr", "live_ptr"), "i32")
    tables = ("path_rows_ptr", "path_firsts_ptr", "path_counts_ptr", "depths_ptr")
    return types | dict.fromkeys(tables, "i32" if use_table else "")


def build(target: GPUTarget, the_plan: Plan, element: str, use_table: bool, merge: bool):
    kernel = merge_partials if merge else attend_tiles
    numbers = the_plan.merge_numbers if merge else the_plan.numbers
    constants = the_plan.merge_constants if merge else the_plan.constants
    signature, constexprs, attributes = specialisation(
        kernel, numbers, constants, pointer_types(element, use_table)
    )
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=target, options={} if merge else dict(the_plan.options))


def describe(built) -> dict[str, int]:
    """Registers, spills, shared memory, and the instructions that matter."""
    report = {
        "shared": built.metadata.shared,
        "loads": len(re.findall(r"\btt\.load\b", built.asm["ttir"])),
    }
    if "amdgcn" in built.asm:
        text = built.asm["amdgcn"]
        report["spills"] = sum(
            int(re.search(rf"\.{kind}_spill_count:\s*(\d+)", text)[1]) for kind in ("vgpr", "sgpr")
        )
        report["matrix"] = len(re.findall(r"v_mfma", text))
        return report
    text = built.asm["ptx"]
    report["matrix"] = len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", text))
    report["async_16"] = len(re.findall(r"cp\.async\.cg[^\n]*0x10", text))
    report["async_less"] = len(re.findall(r"cp\.async\.ca", text))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        usage = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    report["registers"] = int(found[1])
    report["spills"] = int(found[2]) + int(found[3])
    return report


def main() -> None:
    for architecture in sys.argv[1:]:
        if architecture.startswith("gfx"):
            target = GPUTarget("hip", architecture, 64)
        else:
            target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
        for element, itemsize in ELEMENTS.items():
            for head_dim in (64, 128, 256):
                for num_kv_heads, use_table in ((32, False), (8, False), (8, True)):
                    layout = RowTree(LAYOUT.parents) if use_table else LAYOUT
                    shape = Shape(1, LAYOUT.num_rows, 32, head_dim, num_kv_heads, 4224, 4096)
                    tile = choose_tile(architecture, head_dim, itemsize)
                    the_plan = plan(shape, layout, use_table, tile)
                    for merge in (False, True):
                        built = build(target, the_plan, element, use_table, merge)
                        case = {
                            "architecture": architecture,
                            "element": element,
                            "head_dim": head_dim,
                            "group": 32 // num_kv_heads,
                            "table": use_table,
                            "merge": merge,
                        }
                        print(json.dumps(case | describe(built)), flush=True)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter has nothing to compile"
    main()
