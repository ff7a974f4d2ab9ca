"""Every step once more as single rows: what the whole promise comes down to.

While `checked_steps` is in force, each step's emitted logits, and the keys and values that it commits,
are compared bit for bit with those of one row after the other over a copy of the cache.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lookahead.kv_cache import KVCache
from lookahead.layout import LookaheadLayout
from lookahead.step import Step

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
ONE_ROW = LookaheadLayout(0, 2, 0)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    kind = BITS[first.element_size()]
    return torch.equal(first.contiguous().view(kind), second.contiguous().view(kind))


@contextmanager
def checked_steps() -> Iterator[Counter[str]]:
    """Counts steps, rows, and the rows among them that were verified rather than row 0."""
    run = Step.run
    counts: Counter[str] = Counter()

    def run_checked(
        step: Step, trace: Any = None, keep_logits: bool = False, budget: Any = None
    ) -> Any:
        state, cache = step.state, step.kv_cache
        copy = KVCache(cache.data.clone(), cache.max_length)
        lengths, current = state.lengths.clone(), state.current
        output = run(step, trace, keep_logits=True, budget=budget)
        counts["steps"] += 1
        for sequence, count in enumerate(output.counts.tolist()):
            length = int(lengths[sequence])
            tokens = [int(current[sequence]), *output.emitted[sequence, :count].tolist()]
            alone = copy.sequence(sequence)
            for row in range(count):
                logits = one_row(step, alone, tokens[row], length + row)
                assert same_bits(logits, output.logits[sequence, row]), (length, row, count)
                counts["rows"] += 1
                counts["verified rows"] += row > 0
            committed = slice(length, length + count)
            mine, its = (each.sequence(sequence).data[..., committed, :] for each in (cache, copy))
            assert same_bits(mine, its), (length, count)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "run", run_checked)
        yield counts


@torch.inference_mode()
def one_row(step: Step, cache: KVCache, token: int, length: int) -> torch.Tensor:
    """Logits [vocab] of a token at position `length`, which is committed then."""
    model, one = step.model, torch.ones(1, dtype=torch.int32)
    place = torch.tensor([length], dtype=torch.int32)
    ids = torch.tensor([[token]], dtype=torch.int32)
    hidden = model.forward(ids, place.view(1, 1), ONE_ROW, cache, place, live_rows=one)
    cache.commit(torch.zeros(1, 1, dtype=torch.int64), one, place)
    return model.logits(hidden)[0, 0]
