"""Other implementations of the same attention, for `attn_mask.py` to time beside the kernel.

Each gets what it likes best, made beforehand and not timed: the step's keys gathered behind the prefix,
its mask, its layout. One that cannot run is left out with a reason, which is printed and recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from attn_cases import Case, Inputs

# Some round the scores to 16 bits before the softmax.
SLACK = 4.0
WORKSPACE_BYTES = 256 * 2**20


class Skipped(Exception):
    """A peer cannot run here. Says why, in one line."""


@dataclass(frozen=True)
class Peer:
    """`call` is timed; `restore` brings what it returns to [B, T, num_q_heads, head_dim]."""

    call: Callable[[], torch.Tensor]
    restore: Callable[[torch.Tensor], torch.Tensor]


def sdpa(case: Case, inputs: Inputs) -> Peer:
    """scaled_dot_product_attention with a dense boolean mask.

    Query heads that share a key/value head are folded into rows, since its fast kernels take either a
    mask or grouped heads; keys are padded to the multiple that its kernels would otherwise copy to.
    """
    batch, num_rows, num_q_heads, head_dim = inputs.q.shape
    num_kv_heads, group = case.heads.num_kv_heads, case.heads.group
    keys, values, mask = _padded(inputs, 64)
    q = inputs.q.transpose(1, 2).reshape(batch, num_kv_heads, group * num_rows, head_dim)
    mask = mask.repeat(group, 1).expand(batch, num_kv_heads, -1, -1)

    def restore(out: torch.Tensor) -> torch.Tensor:
        return out.reshape(batch, num_q_heads, num_rows, head_dim).transpose(1, 2)

    return Peer(
        lambda: F.scaled_dot_product_attention(q, keys, values, attn_mask=mask),
        restore,
    )


def flex(case: Case, inputs: Inputs, *, compiled: bool = True) -> Peer:
    """FlexAttention with the same visibility as a mask function, compiled for the case's shape."""
    import torch._dynamo
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num_rows, length = case.layout.num_rows, case.length
    keys, values, mask = _padded(inputs, 128)
    # Rows up to a whole block too, for the kernel also asks about rows that do not exist.
    steps = F.pad(mask[:, length:], (0, 0, 0, -num_rows % 128))

    def visible(
        batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key < length) | steps[row, (key - length).clamp(min=0)]

    q = inputs.q.transpose(1, 2).contiguous()
    block_mask = create_block_mask(
        visible, None, None, num_rows, keys.shape[2], device=str(q.device)
    )
    run: Any = flex_attention
    if compiled:
        # Every case is its own program; without this the compiler gives up after a few.
        torch._dynamo.reset()
        run = torch.compile(flex_attention, dynamic=False)
    grouped = case.heads.group > 1
    return Peer(
        lambda: run(q, keys, values, block_mask=block_mask, enable_gqa=grouped),
        lambda out: out.transpose(1, 2),
    )


def flashinfer(case: Case, inputs: Inputs) -> Peer:
    """FlashInfer's batched prefill of ragged sequences with a custom mask, planned beforehand."""
    if find_spec("flashinfer") is None:
        raise Skipped("flashinfer is not installed")
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    device = inputs.q.device
    batch, num_rows, num_q_heads, head_dim = inputs.q.shape
    num_kv_heads, num_keys = inputs.keys.shape[1:3]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        starts * num_rows,
        starts * num_keys,
        num_q_heads,
        num_kv_heads,
        head_dim,
        custom_mask=inputs.mask.flatten().repeat(batch),
        q_data_type=inputs.q.dtype,
    )
    q = inputs.q.reshape(batch * num_rows, num_q_heads, head_dim)
    keys, values = (
        tensor.transpose(1, 2).reshape(batch * num_keys, num_kv_heads, head_dim)
        for tensor in (inputs.keys, inputs.values)
    )
    return Peer(lambda: wrapper.run(q, keys, values), lambda out: out.view_as(inputs.q))


PEERS: dict[str, Callable[[Case, Inputs], Peer]] = {
    "sdpa": sdpa,
    "flex": flex,
    "flashinfer": flashinfer,
}


def prepare(name: str, case: Case, inputs: Inputs) -> tuple[Peer, torch.Tensor]:
    """The peer and its first result. Raises Skipped for whatever hinders it."""
    try:
        peer = PEERS[name](case, inputs)
        return peer, peer.restore(peer.call())
    except Skipped:
        raise
    except Exception as error:  # a compiler's, a driver's or a library's of another version
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Skipped(f"{name} cannot run: {reason[:200]}") from error


def _padded(inputs: Inputs, multiple: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and mask with unseen keys at the end, up to a multiple."""
    more = -inputs.keys.shape[2] % multiple
    keys, values = (F.pad(tensor, (0, 0, 0, more)) for tensor in (inputs.keys, inputs.values))
    return keys, values, F.pad(inputs.mask, (0, more))
