"""A model whose forward pass on a CPU is `forward_numba.py`'s compiled function.

Knows weights, buffers and threads; what is computed is the compiled function's business.
"""

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from lookahead.config import ModelConfig
from lookahead.kernels.attn_mask_numba import near_dtype, paths_of, scratch_size
from lookahead.kernels.checks import wide_dtype
from lookahead.kernels.product_numba import Packed, filled_up, link_width, pack, product
from lookahead.kernels.simd_types import LANES, TAGS, typed, whole_numbers
from lookahead.kernels.team import NUM_TEAM_ARGUMENTS, team_of
from lookahead.kv_cache import KVCache
from lookahead.layout import RowTree
from lookahead.models.forward_numba import (
    CachePlace,
    Choices,
    Head,
    Places,
    Sizes,
    run_forward,
)
from lookahead.models.row_buffers import RowBuffers
from lookahead.models.row_trial import try_out
from lookahead.models.weights import LayerWeights, Linear, LlamaWeights

# Tokens, positions, layout, cache, lengths and live rows, as `Llama.forward` takes them.
Given = tuple[torch.Tensor, torch.Tensor, RowTree, KVCache, torch.Tensor, torch.Tensor]
Chosen = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Call(NamedTuple):
    """A call of `run_forward` that is made again with the same tensors.

    Attributes:
        run_forward, function: what is called, and its code for arguments of these types.
        num_rows: B * T.
        arguments: see `NumbaForward._arguments`.
        chosen: what `choose` returns.
        given: what `choose` was given, to be there for as long as its addresses are used.
    """

    run_forward: Callable
    function: Callable
    num_rows: int
    arguments: tuple[tuple[Any, ...], tuple[Any, ...]]
    chosen: Chosen
    given: tuple[Any, ...]


def _check_numbers(name: str, numbers: np.ndarray, behind: int) -> None:
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < behind:
        raise ValueError(f"{name}: expected 0..{behind - 1}, got {numbers.tolist()!s:.200}")


class NumbaForward:
    """A model's packed weights and the buffers of its rows.

    Attributes:
        inexact_reason, row_block: a row depends on itself alone, so blocks are of one row.
    """

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Takes the layers out of `weights` one by one."""
        self._dtype = weights.embedding.dtype
        self._vocab_size = config.vocab_size
        self._lock = Lock()
        self._wide = wide_dtype(self._dtype)
        self._cos, self._sin = cos, sin
        self._kept: list[torch.Tensor] = []  # what is known by its address only
        self._head = pack(weights.head, None)
        is_tied = weights.head is weights.embedding
        embedding = self._head.weight if is_tied else weights.embedding
        self._embedding = self._keep(embedding)
        self._head_at = Head(
            self._head.weight.data_ptr(), self._head.bias.data_ptr(), self._head.num_vectors,
            self._head.out_size,
        )  # fmt: skip
        self._first_norm = self._keep(self._wide_norm(weights.layers[0].input_norm))
        layers = []
        while weights.layers:
            layer = weights.layers.pop(0)
            following = weights.layers[0].input_norm if weights.layers else weights.norm
            layers.append(self._layer(layer, following))
        self._layers = np.array(layers, dtype=np.int64)
        group = config.num_q_heads // config.num_kv_heads
        heads = (config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim
        links, width = self._head.num_links, link_width(self._dtype)
        self._sizes = Sizes(
            num_layers=len(layers),
            hidden=config.hidden_size,
            hidden_stride=filled_up(config.hidden_size),
            num_kv_heads=config.num_kv_heads,
            group=group,
            head_dim=config.head_dim,
            head_stride=filled_up(config.head_dim),
            qkv_stride=filled_up(heads) + LANES,
            attended_stride=filled_up(config.num_q_heads * config.head_dim),
            intermediate=config.intermediate_size,
            gate_up_stride=filled_up(2 * config.intermediate_size) + LANES,
            activated_stride=filled_up(config.intermediate_size),
            width=width,
            number_bytes=self._dtype.itemsize,
            scratch_bytes=scratch_size(config.head_dim) * self._wide.itemsize,
            vocab_vectors_stride=links * LANES * width if is_tied else 0,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
        )
        self._buffers = RowBuffers(self._sizes, self._dtype, self._wide)
        self.inexact_reason = try_out(config, self._dtype, self._choose)
        self.row_block = None if self.inexact_reason else 1

    def prepare(self, row_counts: Iterable[int], logit_counts: Iterable[int]) -> None:
        """See `Llama.prepare`. All numbers of rows are run by the same code."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: RowTree,
        cache: KVCache,
        lengths: torch.Tensor,
        live_rows: torch.Tensor,
    ) -> torch.Tensor:
        """See `Llama.forward`."""
        num_threads = torch.get_num_threads()
        out = torch.empty((*tokens.shape, self._sizes.hidden_stride), dtype=self._dtype)
        given = (tokens, positions, layout, cache, lengths, live_rows)
        self._run(given, num_threads, out.data_ptr(), self._choices([], num_threads))
        return out[..., : self._sizes.hidden]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Llama.logits`."""
        return self._logits(hidden, torch.get_num_threads())

    def choose(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: RowTree,
        cache: KVCache,
        lengths: torch.Tensor,
        live_rows: torch.Tensor,
        rows: torch.Tensor,
        kept: dict | None = None,
    ) -> Chosen:
        """See `Llama.choose`; the rows must be live."""
        given = (tokens, positions, layout, cache, lengths, live_rows)
        num_threads = torch.get_num_threads()
        if kept is None:
            return self._choose(given, rows, num_threads)
        key = (id(tokens), id(rows), num_threads)
        call: _Call | None = kept.get(key)
        if call is None or call.run_forward is not run_forward:
            call = kept[key] = self._new_call(given, rows, num_threads, kept)
        with self._lock:
            self._buffers.make_room(call.num_rows, num_threads)
            before, behind = call.arguments
            team_of(num_threads).run(call.function, *before, self._buffers.addresses, *behind)
        return call.chosen

    def _choose(
        self,
        given: Given,
        rows: torch.Tensor,
        num_threads: int,
    ) -> Chosen:
        tokens, _, _, _, _, live_rows = given
        batch, num_rows = tokens.shape
        wanted = whole_numbers(rows)
        _check_numbers("rows", wanted, batch * num_rows)
        if (wanted % num_rows >= whole_numbers(live_rows)[wanted // num_rows]).any():
            raise ValueError(f"rows: expected live rows, got {wanted.tolist()!s:.200}")
        logits = self._new_logits(len(wanted))
        choices = self._choices(wanted, num_threads, logits.data_ptr())
        self._run(given, num_threads, 0, choices)
        return self._chosen(logits, choices)

    def _new_call(self, given: Given, rows: torch.Tensor, num_threads: int, kept: dict) -> _Call:
        """How these tensors are called from now on. All that are kept write to one buffer."""
        tokens, positions, _, _, lengths, live_rows = given
        for tensor in (tokens, positions, lengths, live_rows, rows):
            if tensor.dtype != torch.int64 or not tensor.is_contiguous():
                raise ValueError(
                    "kept: expected contiguous tensors of torch.int64, got one of "
                    f"{tensor.dtype} with strides {tensor.stride()}"
                )
        logits = kept.get("logits")
        if logits is None or len(logits) < len(rows):
            kept.clear()  # calls that write to a buffer which is given up
            logits = kept["logits"] = self._new_logits(len(rows))
        choices = self._choices(rows.numpy(), num_threads, logits.data_ptr())
        before, behind = self._arguments(given, 0, choices)
        types = (*[0] * NUM_TEAM_ARGUMENTS, *before, self._buffers.addresses, *behind)
        return _Call(
            run_forward, typed(run_forward, *types), tokens.numel(), (before, behind),
            self._chosen(logits[: len(rows)], choices), (*given, rows),
        )  # fmt: skip

    def _new_logits(self, count: int) -> torch.Tensor:
        return torch.empty((count, self._head.num_vectors * LANES), dtype=self._dtype)

    def _chosen(self, logits: torch.Tensor, choices: Choices) -> Chosen:
        return (
            logits[:, : self._head.out_size],
            torch.from_numpy(choices.tokens),
            torch.from_numpy(choices.finite),
        )

    def _choices(
        self, rows: Sequence[int] | np.ndarray, num_threads: int, logits: int = 0
    ) -> Choices:
        """Room for what becomes of these rows."""
        wanted = np.asarray(rows, dtype=np.int64)
        shares = (num_threads, len(wanted))
        return Choices(
            wanted, logits, np.empty(len(wanted), dtype=np.int64), np.empty(len(wanted), dtype=bool),
            np.empty(shares, dtype=np.int64), np.empty(shares), np.empty(shares, dtype=bool),
        )  # fmt: skip

    def _run(
        self,
        given: Given,
        num_threads: int,
        out: int,
        choices: Choices,
    ) -> None:
        """`out` is the address that hidden states go to, 0 for none."""
        tokens, positions = given[:2]
        _check_numbers("tokens", whole_numbers(tokens), self._vocab_size)
        _check_numbers("positions", whole_numbers(positions), self._cos.shape[0])
        before, behind = self._arguments(given, out, choices)
        with self._lock:
            self._buffers.make_room(max(tokens.numel(), len(choices.rows)), num_threads)
            team_of(num_threads).run(run_forward, *before, self._buffers.addresses, *behind)

    def _arguments(
        self,
        given: Given,
        out: int,
        choices: Choices,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Arguments of `run_forward`, but for the team's, before and behind the buffers' addresses."""
        tokens, positions, layout, cache, lengths, live_rows = given
        batch, num_rows = tokens.shape
        room = cache.data.shape[4] - cache.row_start
        if num_rows > room:
            raise ValueError(f"cache: expected room for {num_rows} rows, got {room}")
        paths = paths_of(layout)
        places = Places(
            np.empty(batch * num_rows, dtype=np.int64),
            np.empty(batch * num_rows, dtype=np.int64),
            np.empty(batch + 1, dtype=np.int64),
            np.empty((batch, len(paths.first)), dtype=np.int64),
        )
        where = CachePlace(cache.data.data_ptr(), cache.row_start, *cache.data.stride()[:4])
        tags = (TAGS[self._dtype], TAGS[near_dtype(self._dtype)], TAGS[self._wide])
        return (*tags, self._sizes), (
            self._embedding, self._first_norm, self._layers, self._cos.data_ptr(),
            self._sin.data_ptr(), where, whole_numbers(tokens), whole_numbers(positions),
            whole_numbers(lengths), whole_numbers(live_rows), paths, places, out, self._head_at,
            choices,
        )  # fmt: skip

    def _logits(self, hidden: torch.Tensor, num_threads: int) -> torch.Tensor:
        rows = hidden.reshape(-1, self._head.in_size)
        if rows.shape[1] % self._sizes.width:
            rows = F.pad(rows, (0, 1))
        out = rows.new_empty((rows.shape[0], self._head.num_vectors * LANES))
        product(team_of(num_threads), rows, self._head, out)
        return out[:, : self._head.out_size].view(*hidden.shape[:-1], -1)

    def _keep(self, tensor: torch.Tensor) -> int:
        """The address of a tensor that is needed from now on."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _wide_norm(self, weight: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(filled_up(weight.shape[0]), dtype=self._wide)
        wide[: weight.shape[0]] = weight
        return wide

    def _layer(self, layer: LayerWeights, next_norm: torch.Tensor) -> list[int]:
        """Addresses in the order of the names above."""

        def packed(linear: Linear) -> list[int]:
            found: Packed = pack(linear.weight, linear.bias)
            return [self._keep(found.weight), self._keep(found.bias)]

        return [
            *packed(layer.qkv),
            *packed(layer.output),
            self._keep(self._wide_norm(layer.post_attention_norm)),
            *packed(layer.gate_up),
            *packed(layer.down),
            self._keep(self._wide_norm(next_norm)),
        ]
