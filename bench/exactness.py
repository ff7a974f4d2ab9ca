"""Is lookahead's text autoregressive decoding's, bit for bit?

Runs each prompt autoregressively and with each configuration, and compares ids, the logits that each
emitted token is the choice of and, with `--logprobs`, its log-probabilities. `--batches` runs every
configuration in batches too, against each prompt alone. Where tokens are drawn, a row tells how many
texts are the same under another seed. `--peers transformers` compares its greedy decoding with its
prompt look-up decoding. `--resume FILE` keeps finished prompts there and goes on from them. `--cost`
compares step times instead: the exact engine over the same engine without exactness. Progress goes to
standard error, tables and a last line of JSON to standard output. Exit codes: 0; 1 when a configuration
differs; 2 for wrong input.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import timing  # first, for it says in one line that the package cannot be imported

# isort: split
import exactness_cost
import exactness_peer
import torch
from exactness_figures import is_broken, summarise, table
from exactness_plan import Plan, build_parser, make_plan
from exactness_resume import Finished, Found, key_of
from exactness_runs import Comparison
from sampling_words import describe
from tqdm import tqdm

from lookahead.devices import dtype_name
from lookahead.errors import InputError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    return timing.run_main(build_parser(__doc__), _run, arguments)


def _run(options: argparse.Namespace) -> int:
    plan = make_plan(options)
    where = f"{dtype_name(plan.dtype)} on {plan.device}, {torch.get_num_threads()} threads"
    if options.cost:
        engines = plan.load_engine(), plan.load_engine(exact=False)
        rows = exactness_cost.measure(*engines, plan.configs, plan.tokenizer)
        print(f"{where}\n\n{exactness_cost.table(rows)}\n")
        record: dict[str, Any] = {"benchmark": "exactness_cost", "rows": rows}
        broken = []
    else:
        rows = summarise(list(_compare_all(plan)))
        sampling = describe(plan.sampling)
        print(f"{where}, {len(plan.jobs)} prompts, {sampling}\n\n{table(rows)}\n")
        record = {
            "benchmark": "exactness",
            "rows": rows,
            "prompts": len(plan.jobs),
            "sampling": sampling,
            "batches": plan.batches,
            "logprobs": options.logprobs,
        }
        broken = [row for row in rows if is_broken(row)]
    record |= {
        "checkpoint": options.ckpt.resolve().name,
        "max_new_tokens": options.max_new_tokens,
        "files": [str(path.name) for path in options.prompts],
        "provenance": timing.provenance(plan.device, plan.dtype, options.prompts[0]),
    }
    timing.publish(record, options.json_out)
    return int(bool(broken))


def _compare_all(plan: Plan) -> Iterator[Found]:
    """What was found on each prompt, that of an earlier run included."""
    finished = Finished(plan)
    engine = plan.load_engine()
    if engine.model.inexact_reason is not None:
        raise InputError(f"this engine is not exact here: {engine.model.inexact_reason}")
    peer = None
    if plan.options.peers:
        peer = exactness_peer.LookUpPeer(
            plan.options.ckpt, engine.model.config, plan.dtype, plan.device
        )
    comparison = Comparison(plan, engine)
    jobs = {key_of(number, job): job for number, job in enumerate(plan.jobs)}
    left = [key for key in jobs if key not in finished]
    at_once = plan.batches[-1]
    with tqdm(
        total=len(jobs), initial=len(jobs) - len(left), unit="prompt", disable=None
    ) as progress:
        for start in range(0, len(left), at_once):
            keys = left[start : start + at_once]
            for key, found in zip(
                keys, comparison.compare([jobs[key] for key in keys]), strict=True
            ):
                if peer is not None:
                    found.append(peer.compare(jobs[key].token_ids, plan.options.max_new_tokens))
                finished.add(key, found)
                progress.update()
    yield from (finished[key] for key in jobs)


if __name__ == "__main__":
    sys.exit(main())
