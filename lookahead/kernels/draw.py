"""The draw: each row's next token from its own warped distribution, by a random stream of its own.

One definition of the order of the warpers and of the stream: `draw_ref.py` is the specification.
"""

import torch

from lookahead.kernels.checks import INDEX_DTYPES, check_floating, check_tensor, choose
from lookahead.kernels.warpers import NUM_VALUES, Histories, Warpers

IMPLEMENTATIONS = {
    "torch": "draw_ref:draw_ref",
    "triton": "draw_triton:draw_triton",
    "numba": "draw_numba:draw_numba",
}


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    histories: Histories,
    warpers: Warpers,
    implementation: str = "torch",
    kept: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the next token of each row that can matter.

    A row's draw depends on its logits, its history, its sample and the position of the token that is
    drawn: not on other rows, nor on the sequence's place in the batch.

    Args:
        logits: [n, vocab].
        rows: [n] int64, numbers sequence * T + row of row 0 and of others, ascending; with a row its
            parent, if that is drawn.
        chosen: [n] int64, what is returned at rows that are not drawn.
        histories, warpers: see there.
        implementation: which implementation runs.
        kept: where an implementation may keep its buffers, empty at first, for a caller that goes on
            with tensors of the same kind: they are checked the first time only.

    Returns:
        tokens [n] int64, and possible [n] bool: whether there was a token with a finite largest logit.
        Both are undefined at rows that are not reached: those with an ancestor behind row 0 (or that
        are themselves one) whose token is not what was drawn at its parent.

    Raises:
        ValueError: an argument does not fit, or the implementation cannot take it.
    """
    run = choose(IMPLEMENTATIONS, implementation)
    if kept is None or not kept:
        kept = {} if kept is None else kept
        _check(logits, rows, chosen, histories, warpers)
        kept["checked"] = True
    return run(logits, rows, chosen, histories, warpers, kept)


def _check(
    logits: torch.Tensor,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    histories: Histories,
    warpers: Warpers,
) -> None:
    check_floating("logits", logits, "[n, vocab]", rank=2)
    num_rows, vocab_size = logits.shape
    for name, numbers in (("rows", rows), ("chosen", chosen)):
        check_tensor(name, numbers, (num_rows,), logits, (torch.int64,))
    check_tensor("values", warpers.values, (NUM_VALUES,), logits, (torch.float32,))
    check_tensor("bias", warpers.bias, (vocab_size,), logits, (torch.float32,))
    check_tensor("seed", warpers.seed, (1,), logits, (torch.int64,))
    batch, step_rows = histories.tokens.shape
    check_tensor("tokens", histories.tokens, (batch, step_rows), logits, INDEX_DTYPES)
    check_tensor("parents", histories.parents, (step_rows,), logits, (torch.int64,))
    check_tensor("text", histories.text, (batch, histories.text.shape[1]), logits, (torch.int32,))
    for name, numbers in (
        ("lengths", histories.lengths),
        ("prompt_lengths", histories.prompt_lengths),
        ("samples", histories.samples),
    ):
        check_tensor(name, numbers, (batch,), logits, INDEX_DTYPES)
    eos_shape = (batch, histories.eos_ids.shape[1])
    check_tensor("eos_ids", histories.eos_ids, eos_shape, logits, (torch.int64,))
