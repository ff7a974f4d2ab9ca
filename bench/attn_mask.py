"""Time `attend` beside other implementations of the same attention, each result checked first.

On a CUDA GPU: the Triton kernel with a cold cache, torch's attention with a dense mask, FlexAttention
and FlashInfer in turn, and whether a verified row is the autoregressive row bit for bit. Elsewhere
nothing is timed on a GPU, and that is the first line: the torch reference is timed on the CPU, the
kernel is checked in Triton's interpreter, and its binaries are reported. A wrong result is never timed.
Progress goes to standard error, tables and a last line of JSON to standard output. Exit codes: 0; 1
when a result is wrong; 2 for wrong input.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timing  # first, for it says in one line that the package cannot be imported

# isort: split
import attn_contract
import attn_cpu
import attn_gpu
import attn_plot
import attn_static
import attn_sweep
import torch
from attn_cases import Attend, WrongResult
from attn_peers import PEERS

from lookahead.errors import InputError
from lookahead.kernels.attn_mask import attend

MAX_LENGTH = 2**20


def build_parser() -> timing.Parser:
    """All options."""
    parser = timing.Parser(prog="bench/attn_mask.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    on_cpu, on_gpu = attn_cpu.DEFAULT_LENGTHS, attn_gpu.DEFAULT_LENGTHS
    add(
        "--lengths",
        metavar="L,...",
        help=f"committed lengths, default {_listed(on_cpu)}; on a GPU {_listed(on_gpu)}",
    )
    add("--repeats", type=timing.count, metavar="COUNT", help="default 10; on a GPU 30")
    add("--quick", action="store_true", help="on a GPU: fewer steps and lengths, batch 1 alone")
    add(
        "--peers", default=",".join(PEERS), metavar="NAME,...", help="on a GPU, default %(default)s"
    )
    add("--seconds", type=timing.count, metavar="COUNT", help="on a GPU: begin no case later")
    add("--static", action="store_true", help="only report binaries, for every architecture")
    add("--sweep", action="store_true", help="only compare tiles: timed on a GPU, else as binaries")
    add("--architecture", metavar="NAME,...", help="of binaries, default sm_90; --static: all")
    add("--plot", type=Path, metavar="FILE", help="also draw times over lengths, as a PNG")
    add("--json-out", type=Path, metavar="FILE", help="write the line of JSON here too")
    return parser


def main(arguments: Sequence[str] | None = None, operation: Attend = attend) -> int:
    """Run the benchmark on an implementation of `attend`; returns the exit code."""
    return timing.run_main(build_parser(), partial(_run, operation), arguments)


def _run(operation: Attend, options: argparse.Namespace) -> int:
    _refuse_idle_options(options)
    lengths = None if options.lengths is None else parse_lengths(options.lengths)
    peers = parse_peers(options.peers)
    everything = ",".join(attn_static.ARCHITECTURES) if options.static else "sm_90"
    given = everything if options.architecture is None else options.architecture
    architectures = attn_static.parse_architectures(given)
    timing.check_writable(options.json_out)
    attn_plot.require(options.plot)
    timer = None if options.static else attn_gpu.find_timer()
    if timer is None:
        print(f"nothing was timed on a GPU: {_reason(options)}", flush=True)
    try:
        if options.static:
            found = {"static": attn_static.report(architectures)}
        elif options.sweep:
            found = _sweep(architectures[0], timer, options.quick)
        elif timer is not None:
            found = _time_on_gpu(operation, lengths, peers, options, timer)
        else:
            found = _run_on_cpu(operation, lengths, architectures, options.repeats)
    except WrongResult as wrong:
        print(f"refused: {wrong}; no time is reported", file=sys.stderr)
        return 1
    is_reference = timer is None and not (options.static or options.sweep)
    provenance = timing.provenance(
        torch.device("cpu") if timer is None else timer.device,
        torch.float32 if is_reference else attn_gpu.DTYPE,
    )
    if options.plot is not None and "rows" in found:
        subtitle = f"{provenance['gpu'] or provenance['processor']}, {provenance['dtype']}"
        attn_plot.write(found["rows"], options.plot, subtitle)
    record = {
        "benchmark": "attn_mask",
        "timed_on_gpu": timer is not None,
        **found,
        "provenance": provenance,
    }
    timing.publish(record, options.json_out)
    return 0


def _refuse_idle_options(options: argparse.Namespace) -> None:
    """Options that would do nothing beside --static or --sweep."""
    for only, idle in (("static", ("sweep", "lengths", "plot")), ("sweep", ("lengths", "plot"))):
        for name in idle:
            if getattr(options, only) and getattr(options, name):
                raise InputError(f"--{name} does nothing beside --{only}: leave one of them out")


def _time_on_gpu(
    operation: Attend,
    lengths: Sequence[int] | None,
    peers: Sequence[str],
    options: argparse.Namespace,
    timer: attn_gpu.ColdTimer,
) -> dict[str, Any]:
    repeats = options.repeats or attn_gpu.DEFAULT_REPEATS
    contract = attn_contract.check_contract(
        attn_gpu.MODELS, attn_gpu.DTYPE, operation, timer.device
    )
    cases = list(attn_gpu.cases(options.quick, lengths))
    found = attn_gpu.time_all(cases, repeats, operation, peers, options.seconds, timer)
    print(
        f"{timer.name}, bfloat16, {repeats} runs, cold L2 cache, graphs replayed\n"
        f"copy {found['copy_gb_per_s']:.0f} GB/s, matrix product {found['matmul_tflops']:.0f} TFLOPS, "
        f"empty graph {found['empty_graph_us']:.1f} us\n"
        f"{contract['rows_that_differ']} of {contract['rows']} verified rows differ from the "
        f"autoregressive row\n\n{attn_gpu.table(found['rows'])}\n\n"
        "limit: the larger of bytes over copy bandwidth and arithmetic over the product's speed"
    )
    for reason in attn_gpu.reasons(found["rows"]):
        print(f"left out: {reason}")
    if found["cases_left_out"]:
        print(f"left out: {found['cases_left_out']} cases, for lack of time")
    print()
    return {"repeats": repeats, "contract": contract, **found}


def _run_on_cpu(
    operation: Attend,
    lengths: Sequence[int] | None,
    architectures: Sequence[str],
    repeats: int | None,
) -> dict[str, Any]:
    repeats = repeats or attn_cpu.DEFAULT_REPEATS
    rows = attn_cpu.time_reference(lengths or attn_cpu.DEFAULT_LENGTHS, repeats, operation)
    interpreted = attn_cpu.check_interpreted(operation)
    print(
        f"\nthe reference in torch on the CPU, float32\n\n{attn_cpu.table(rows)}\n\n"
        "ratio: time of dense over time of attend, above 1 attend is faster;\n"
        "dense: scaled_dot_product_attention, its mask and its gathered keys made beforehand\n"
    )
    found = {"repeats": repeats, "rows": rows, "interpreted": interpreted, "static": None}
    if interpreted is None:
        print("Triton is not installed: its kernel was neither checked nor built\n")
        return found
    print(
        f"the Triton kernel in its interpreter: {interpreted['cases']} cases are right, off by at most "
        f"{interpreted['max_error']:.1e}"
    )
    return found | {"static": attn_static.report(architectures)}


def _sweep(architecture: str, timer: attn_gpu.ColdTimer | None, quick: bool) -> dict[str, Any]:
    head_dims = (128,) if quick else attn_sweep.HEAD_DIMS
    if timer is None:
        builds = attn_sweep.build(architecture, head_dims)
        print(f"\nbinaries for {architecture}, bfloat16\n\n{attn_sweep.build_table(builds)}\n")
        return {"sweep": {"architecture": architecture, "builds": builds}}
    from lookahead.kernels import attn_mask_launch

    rows = attn_sweep.time_tiles(head_dims, quick, timer)
    name = attn_mask_launch.architecture(timer.device)
    tiles = attn_sweep.propose(rows)
    print(f"{attn_sweep.time_table(rows)}\n\nproposed:\n{attn_sweep.proposal(name, tiles)}\n")
    proposed = {str(size): vars(tile) for size, tile in tiles.items()}
    return {"sweep": {"architecture": name, "times": rows, "proposed": proposed}}


def parse_lengths(text: str) -> list[int]:
    """ "128,512" -> numbers; raises InputError for anything else."""
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() for number in numbers):
        default = _listed(attn_cpu.DEFAULT_LENGTHS)
        raise InputError(f'--lengths: expected numbers like "{default}", got {text!r}')
    lengths = [int(number) for number in numbers]
    if max(lengths) > MAX_LENGTH:
        raise InputError(f"--lengths: expected at most {MAX_LENGTH}, got {max(lengths)}")
    return lengths


def parse_peers(text: str) -> list[str]:
    """Names, separated by commas; none is allowed."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in PEERS:
            raise InputError(f"--peers: {name!r} is not known, expected {', '.join(PEERS)}")
    return names


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _reason(options: argparse.Namespace) -> str:
    if options.static:
        return "--static only reports binaries"
    return "this machine has none that torch can use"


if __name__ == "__main__":
    sys.exit(main())
