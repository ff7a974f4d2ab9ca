"""A step of fixed shape is one program: the same operations whatever the buffers hold.

The step is traced with tensors that have shapes and no numbers, as for a GPU, so that whatever needs a
number on the host fails. Attention's specification reads lengths on the host; its place is taken by one
opaque operation, as a kernel is for a graph.
"""

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from oracles.naive_llama import random_checkpoint
from tiny_models import build_llama, build_step, one_thread, start_step
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from lookahead import step_ref
from lookahead.config import LookaheadConfig
from lookahead.kernels import rope_write
from lookahead.kernels.attn_mask import attend
from lookahead.layout import LookaheadLayout
from lookahead.models import forward_ops
from lookahead.step import Step

VOCAB_SIZE = 8
PROMPTS = ([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 3, 1, 4], [2, 7, 1])


@torch.library.custom_op("lookahead_test::attend", mutates_args=())
def opaque_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    live_rows: torch.Tensor,
    shape: list[int],
    row_start: int,
) -> torch.Tensor:
    layout = LookaheadLayout(*shape)
    return attend(q, k_cache, v_cache, lengths, layout, row_start=row_start, live_rows=live_rows)


@opaque_attend.register_fake
def _(q, k_cache, v_cache, lengths, live_rows, shape, row_start):
    return torch.empty_like(q)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Attention is one operation, and nobody looks at numbers to check them."""

    def attend_opaquely(q, k_cache, v_cache, lengths, layout, *, row_start, live_rows, **options):
        assert isinstance(layout, LookaheadLayout)
        shape = [layout.window, layout.levels + 1, layout.guesses]
        return opaque_attend(q, k_cache, v_cache, lengths, live_rows, shape, row_start)

    monkeypatch.setattr(forward_ops, "attend", attend_opaquely)
    monkeypatch.setattr(rope_write, "check_numbers", lambda *arguments: None)
    with one_thread():
        yield


def buffers_of(step: Step) -> list[tuple[object, str]]:
    """Whose attribute each buffer is that a step reads and writes."""
    return [
        *((step.state, name) for name in ("tokens", "lengths", "limits", "finished", "eos_ids")),
        *((step.window, name) for name in ("tokens", "steps")),
        *((step.pool, name) for name in ("entries", "origins", "counts")),
        (step.kv_cache, "data"),
    ]


def copies(step: Step) -> list[torch.Tensor]:
    return [getattr(owner, name).clone() for owner, name in buffers_of(step)]


@contextmanager
def given(step: Step, buffers: list[torch.Tensor]):
    """The step over other buffers."""
    places = buffers_of(step)
    own = [getattr(owner, name) for owner, name in places]
    for (owner, name), buffer in zip(places, buffers, strict=True):
        setattr(owner, name, buffer)
    yield
    for (owner, name), buffer in zip(places, own, strict=True):
        setattr(owner, name, buffer)


def run_on(step: Step) -> Callable[..., list[torch.Tensor]]:
    """The step as a function of its buffers, which it changes; returns what it tells of the step."""

    def run(*buffers: torch.Tensor) -> list[torch.Tensor]:
        with given(step, list(buffers)):
            output = step.run()
        return [output.emitted, output.counts, output.finished, output.finite]

    return run


def traced(step: Step) -> GraphModule:
    """The step's operations, with weights and the layout's numbers as constants."""
    trace = make_fx(run_on(step), tracing_mode="fake", _allow_non_fake_inputs=True)
    program = trace(*copies(step))
    for node in program.graph.nodes:
        values = [value for value in tree_leaves(node.meta.get("val")) if hasattr(value, "shape")]
        is_fixed = all(type(size) is int for value in values for size in value.shape)
        assert is_fixed, f"data dependent shape: {node.target}"
    return program


def new_step(shape: tuple[int, int, int], fixed_shape: bool | None = True) -> Step:
    """A step with both prompts started."""
    checkpoint = random_checkpoint(1, vocab_size=VOCAB_SIZE)
    model = build_llama(checkpoint, torch.float64, implementation="torch")
    step = build_step(model, LookaheadConfig(*shape), batch_size=2)
    step = Step(model, step.kv_cache, step.state, LookaheadConfig(*shape), fixed_shape)
    for sequence, prompt in enumerate(PROMPTS):
        start_step(step, prompt, limit=len(prompt) + 9 + 20 * sequence, sequence=sequence)
    return step


SHAPES = [(5, 4, 5), (3, 2, 2), (0, 5, 3), (0, 2, 0), (4, 3, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_program_does_not_depend_on_the_state(shape):
    """At the start, with one sequence over, and with both; the pool filling all the while."""
    step = new_step(shape)
    first = traced(step)
    lives, seen = set(), {(False, False)}
    while not step.state.finished.all():
        lives.add(tuple(step.pool.look_up(step.state.current)[2].tolist()))
        step.run()
        finished = tuple(step.state.finished.tolist())
        if finished not in seen:
            seen.add(finished)
            assert traced(step).code == first.code
    assert len(seen) == 3
    assert len(lives) > 1 or not shape[2], "other candidates at other steps"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_program_is_the_step(shape):
    """Traced once at the start, it leaves and tells at every step what the step does."""
    step = new_step(shape)
    program = traced(step)
    mine = copies(step)
    steps = 0
    while not step.state.finished.all():
        told = program(*mine)
        output = step.run()
        assert told[1].tolist() == output.counts.tolist()
        for expected, found in zip(output[:4], told, strict=True):
            assert torch.equal(expected, found)
        for expected, found in zip(copies(step), mine, strict=True):
            assert torch.equal(expected.nan_to_num(), found.nan_to_num())
        steps += 1
    assert steps > 5


def test_a_fixed_shape_changes_no_text():
    """Rows that hold no candidate are run, and nothing else happens."""
    texts = []
    for fixed_shape in (True, False, None):
        step = new_step((5, 4, 5), fixed_shape)
        assert step.fixed_shape is bool(fixed_shape)
        while not step.state.finished.all():
            step.run()
        texts.append([row[:20] for row in step.state.tokens.tolist()])
    assert texts[0] == texts[1] == texts[2]


# What the tracer says of them, or the check behind it.
REFUSALS = r"data.dependent|DataDependent|get value"


def host_looks(judge: Callable) -> Callable:
    def judge_and_look(state, numbers, tokens, chosen, finite, live):
        judgement = judge(state, numbers, tokens, chosen, finite, live)
        if judgement.counts.max().item() == 0:
            return judgement
        return judgement

    return judge_and_look


def host_branches(judge: Callable) -> Callable:
    def judge_and_branch(state, numbers, tokens, chosen, finite, live):
        return judge(state, numbers, tokens, chosen, finite, live if live.any() else 0 * live)

    return judge_and_branch


def shape_follows(judge: Callable) -> Callable:
    def judge_and_count(state, numbers, tokens, chosen, finite, live):
        running = (~state.finished).nonzero()
        return judge(state, numbers, tokens, chosen, finite, live + 0 * running.shape[0])

    return judge_and_count


@pytest.mark.parametrize("planted", [host_looks, host_branches, shape_follows])
def test_a_look_at_data_is_found(monkeypatch, planted):
    monkeypatch.setattr(step_ref, "judge", planted(step_ref.judge))
    step = new_step((5, 4, 5))
    step.run()  # it does no harm otherwise
    with pytest.raises(Exception, match=REFUSALS):
        traced(step)


def test_leaving_rows_out_is_such_a_look():
    step = new_step((5, 4, 5), fixed_shape=False)
    with pytest.raises(Exception, match=REFUSALS):
        traced(step)


def test_a_number_that_the_host_keeps_is_found(monkeypatch):
    """What the host counts would be fixed in a graph; two traces differ."""
    step = new_step((5, 4, 5))
    counted = iter(range(100, 200))
    monkeypatch.setattr(
        step_ref,
        "learn",
        lambda state, *rest, learn=step_ref.learn: (
            learn(state, *rest),
            state.limits + next(counted),
        ),
    )
    assert traced(step).code != traced(step).code
