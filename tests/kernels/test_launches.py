"""How many things a GPU is told to do: kernels of ours and products in a layer, and what a step adds.

Counted in the interpreter: each launch of a kernel by its name, and each operation of torch's that is
more than a look at memory that is there.
"""

from collections import Counter

import pytest
import torch
from oracles.naive_llama import random_checkpoint
from tiny_models import build_llama, build_step, one_thread, start_step
from torch.utils._python_dispatch import TorchDispatchMode

from lookahead.config import LookaheadConfig
from lookahead.kernels import attn_mask, rope_write
from lookahead.step import Step

pytest.importorskip("triton", reason="Triton is not available for this platform")
interpreter = pytest.importorskip("triton.runtime.interpreter")

# One launch each of the library's; what is left of torch's operations are views and memory.
PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm"}
FREE = {
    f"aten.{name}"
    for name in """
        view _unsafe_view _reshape_alias unsqueeze squeeze expand t slice select transpose alias
        detach unbind empty empty_like new_empty
    """.split()
}


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        options = options or {}
        with self:  # of an operation that is made of others, count those
            result = operation.decompose(*arguments, **options)
        if result is not NotImplemented:
            return result
        self.counts[str(operation.overloadpacket)] += 1
        return operation(*arguments, **options)


def count_step(
    monkeypatch: pytest.MonkeyPatch, num_layers: int, shape: tuple[int, int, int] = (3, 4, 2)
) -> tuple[Counter[str], Counter[str]]:
    """Kernels, and torch's operations that launch something, of one step of a model."""
    checkpoint = random_checkpoint(1, vocab_size=8, head_dim=16, num_hidden_layers=num_layers)
    model = build_llama(checkpoint, torch.float32, implementation="triton", exact=False)
    config = LookaheadConfig(*shape)
    step = build_step(model, config)
    step = Step(model, step.kv_cache, step.state, config, fixed_shape=True)
    start_step(step, [3, 1, 4, 1, 5], limit=40)
    launches: Counter[str] = Counter()
    operations = Operations()
    run = interpreter.GridExecutor.__call__

    def launch(executor, *arguments, **options):
        launches[executor.fn.__name__] += 1
        before = operations.counts.copy()
        run(executor, *arguments, **options)
        operations.counts = before  # without what the interpreter does

    with monkeypatch.context() as patch, one_thread(), operations:
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        for module in (attn_mask, rope_write):  # which check numbers on a CPU alone
            patch.setattr(module, "check_numbers", lambda *arguments: None)
        step.run()
    told = {name: count for name, count in operations.counts.items() if name not in FREE}
    return launches, Counter(told)


def test_a_layer_is_six_kernels_and_four_products(monkeypatch):
    """What one layer more adds to a step; the library's copies and sums would show."""
    launches, operations = (
        more - fewer
        for more, fewer in zip(count_step(monkeypatch, 3), count_step(monkeypatch, 2), strict=True)
    )
    assert launches == {
        "rotate_and_store": 1,
        "attend_tiles": 1,
        "merge_partials": 1,
        "normalise_rows": 2,
        "gate_rows": 1,
    }
    assert launches.total() == 6
    assert sum(operations[name] for name in PRODUCTS) == 4
    assert set(operations) <= PRODUCTS


@pytest.mark.parametrize("shape", [(3, 4, 2), (0, 2, 0), (0, 3, 2), (3, 4, 0)], ids=str)
def test_a_step_adds_few(monkeypatch, shape):
    """Beside its layers: one norm, verdict, pool, text and commit; and torch's, which look up, fill
    the rows and find the largest logits."""
    launches, operations = count_step(monkeypatch, 1, shape)
    assert (
        launches
        - Counter(
            rotate_and_store=1, attend_tiles=1, merge_partials=1, normalise_rows=2, gate_rows=1
        )
        == Counter(
            normalise_rows=1,
            judge_sequences=1,
            insert_ngrams=int(shape[2] > 0),
            advance_sequences=1,
            copy_rows=1,
        )
        + Counter()
    )
    others = Counter({name: operations[name] for name in operations if name not in PRODUCTS})
    assert others.total() <= 20, others
