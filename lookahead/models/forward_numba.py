"""The forward pass on a CPU as one compiled function that a team of threads runs together.

Between loading a token's embedding and its last norm nothing returns to Python. Only live rows are
computed. Each row's arithmetic is its own: no product, norm or attention depends on what else is in the
step, on the number of threads or on how the work is shared between them.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from lookahead.config import ModelConfig
from lookahead.kernels.attn_mask_numba import (
    attend_part,
    find_live,
    finish_row,
    near_dtype,
    paths_of,
    scratch_size,
)
from lookahead.kernels.largest_logit import largest_logit
from lookahead.kernels.product_numba import (
    Packed,
    filled_up,
    link_width,
    multiply_share,
    pack,
    product,
    wide_dtype,
)
from lookahead.kernels.rms_norm_numba import add_row, norm_row
from lookahead.kernels.rope_write_numba import write_row
from lookahead.kernels.silu_mul_numba import gate_row
from lookahead.kernels.simd import LANES, TAGS, load_one, pointer, store_one, whole_numbers
from lookahead.kernels.team import meet, share, team_of
from lookahead.kv_cache import KVCache
from lookahead.layout import LookaheadLayout, RowTree
from lookahead.models.weights import LayerWeights, Linear, LlamaWeights

# A key/value head's rows are shared between threads if there are so many.
SHARED_ROWS = 24


class _Sizes(NamedTuple):
    """Numbers that do not change; strides are those of buffers, in numbers."""

    num_layers: int
    hidden: int
    hidden_stride: int
    num_kv_heads: int
    group: int
    head_dim: int
    head_stride: int
    qkv_stride: int
    attended_stride: int
    intermediate: int
    gate_up_stride: int
    activated_stride: int
    width: int  # inner indices of one link
    scratch_bytes: int  # of one thread
    vocab_vectors_stride: (
        int  # numbers of one vector of features of a packed embedding; 0 if not packed
    )
    eps: float
    scale: float


class _Buffers(NamedTuple):
    """Addresses of the buffers of one row capacity."""

    residual: int
    normed: int
    qkv: int
    q: int
    sums: int
    tops: int
    weights: int
    attended: int
    projected: int
    gate_up: int
    activated: int
    scratch: int


class _Places(NamedTuple):
    """Which rows there are: `rows` holds sequence * T + row of each live row, `depths` their depths,
    `first` [B + 1] where a sequence's rows begin and `paths` [B, P + 1] where a path's own rows begin,
    counted from there."""

    rows: np.ndarray
    depths: np.ndarray
    first: np.ndarray
    paths: np.ndarray


class _Cache(NamedTuple):
    """The cache's address, and how many numbers on are the next layer, the values behind the keys, the
    next sequence and the next head."""

    data: int
    row_start: int
    layer: int
    values: int
    sequence: int
    head: int


# What `layers` [layers, 10] holds of each: addresses.
QKV, QKV_BIAS, OUTPUT, OUTPUT_BIAS, POST_NORM, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS, NEXT_NORM = (
    range(10)
)


@njit(nogil=True)
def _vectors(size):
    return -(-size // LANES)


@njit(nogil=True)
def _links(size, width):
    return -(-size // width)


@njit(nogil=True)
def _embed_row(embedding, token, sizes, out):
    """One token's embedding, filled up with zeros."""
    packed, width = sizes.vocab_vectors_stride, sizes.width
    for i in range(sizes.hidden):
        if packed:
            at = (
                token // LANES * packed
                + i // width * LANES * width
                + token % LANES * width
                + i % width
            )
        else:
            at = token * sizes.hidden + i
        store_one(out + i, load_one(embedding + at))


@njit(nogil=True)
def _attend_share(
    thread, num_threads, tag, near_tag, wide_tag, sizes, at, cache, layer, lengths, table, places
):  # fmt: skip
    """This thread's part of a layer's attention."""
    group, stride, kv_heads = sizes.group, sizes.head_stride, sizes.num_kv_heads
    num_rows = places.first[-1]
    parts = num_threads if num_rows * group >= SHARED_ROWS * len(lengths) else 1
    for unit in range(thread, len(lengths) * kv_heads * parts, num_threads):
        sequence, head, part = unit // (kv_heads * parts), unit // parts % kv_heads, unit % parts
        start = places.first[sequence]
        count = (places.first[sequence + 1] - start) * group
        begin, end = share(count, part, parts)
        if begin == end:
            continue
        offset = (head * num_rows + start) * group
        sums = pointer(at.sums, wide_tag) + offset * stride
        weights = pointer(at.weights, wide_tag) + offset
        keys = pointer(cache.data, tag) + (
            layer * cache.layer + sequence * cache.sequence + head * cache.head
        )
        attend_part(
            pointer(at.q, tag) + offset * stride, sums, pointer(at.tops, wide_tag) + offset,
            weights, sizes.head_dim, stride, group, sizes.scale, keys, keys + cache.values,
            lengths[sequence], cache.row_start, places.depths[start : places.first[sequence + 1]],
            places.paths[sequence], table, begin, end, at.scratch + thread * sizes.scratch_bytes,
            near_tag, wide_tag,
        )  # fmt: skip
        for row in range(begin, end):
            out = pointer(at.attended, tag) + (start + row // group) * sizes.attended_stride
            finish_row(
                sums + row * stride, weights + row, sizes.head_dim,
                out + (head * group + row % group) * sizes.head_dim,
            )  # fmt: skip


@njit(nogil=True)
def _norm_share(thread, num_threads, tag, wide_tag, sizes, at, num_rows, added, weight):
    """This thread's rows of a norm, behind the addition of `added` to the residual unless that is 0."""
    begin, end = share(num_rows, thread, num_threads)
    for row in range(begin, end):
        start = row * sizes.hidden_stride
        residual = pointer(at.residual, tag) + start
        if added:
            add_row(pointer(added, tag) + start, residual, sizes.hidden)
        norm_row(
            residual, pointer(weight, wide_tag), sizes.eps, sizes.hidden,
            pointer(at.normed, tag) + start,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _forward(
    thread, num_threads, counter, arrivals, tag, near_tag, wide_tag, sizes, at, embedding, first_norm,
    layers, cos, sin, cache, tokens, positions, lengths, live_rows, paths, places, out,
):  # fmt: skip
    batch, step_rows = tokens.shape
    if thread == 0:
        count = 0
        for sequence in range(batch):
            places.first[sequence] = count
            live = find_live(
                paths, live_rows[sequence], places.rows[count:], places.depths[count:],
                places.paths[sequence],
            )  # fmt: skip
            for row in range(count, count + live):
                places.rows[row] += sequence * step_rows
            count += live
        places.first[batch] = count
    arrivals = meet(counter, arrivals, num_threads)
    num_rows = places.first[batch]
    begin, end = share(num_rows, thread, num_threads)
    for row in range(begin, end):
        sequence, number = places.rows[row] // step_rows, places.rows[row] % step_rows
        _embed_row(
            pointer(embedding, tag), tokens[sequence, number], sizes,
            pointer(at.residual, tag) + row * sizes.hidden_stride,
        )  # fmt: skip
    _norm_share(thread, num_threads, tag, wide_tag, sizes, at, num_rows, 0, first_norm)
    arrivals = meet(counter, arrivals, num_threads)

    heads = (sizes.group + 2) * sizes.num_kv_heads * sizes.head_dim
    attended = sizes.group * sizes.num_kv_heads * sizes.head_dim
    hidden_vectors, hidden_links = _vectors(sizes.hidden), _links(sizes.hidden, sizes.width)
    half = sizes.head_dim // 2
    for layer in range(sizes.num_layers):
        weight = layers[layer]
        multiply_share(
            thread, num_threads, tag, wide_tag, at.normed, sizes.hidden_stride, num_rows, weight[QKV],
            weight[QKV_BIAS], _vectors(heads), hidden_links, sizes.width, at.qkv, sizes.qkv_stride,
        )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        for row in range(begin, end):
            sequence, number = places.rows[row] // step_rows, places.rows[row] % step_rows
            keys = pointer(cache.data, tag) + (
                layer * cache.layer
                + sequence * cache.sequence
                + (cache.row_start + number) * sizes.head_dim
            )
            angle = positions[sequence, number] * half
            write_row(
                pointer(at.qkv, tag) + row * sizes.qkv_stride, sizes.num_kv_heads, sizes.group,
                sizes.head_dim, pointer(cos, wide_tag) + angle, pointer(sin, wide_tag) + angle,
                keys, keys + cache.values, cache.head,
                pointer(at.q, tag) + row * sizes.group * sizes.head_stride,
                num_rows * sizes.group * sizes.head_stride, sizes.head_stride,
            )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        _attend_share(
            thread, num_threads, tag, near_tag, wide_tag, sizes, at, cache, layer, lengths, paths.table,
            places,
        )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        multiply_share(
            thread, num_threads, tag, wide_tag, at.attended, sizes.attended_stride, num_rows,
            weight[OUTPUT], weight[OUTPUT_BIAS], hidden_vectors, _links(attended, sizes.width),
            sizes.width, at.projected, sizes.hidden_stride,
        )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        _norm_share(
            thread, num_threads, tag, wide_tag, sizes, at, num_rows, at.projected, weight[POST_NORM]
        )
        arrivals = meet(counter, arrivals, num_threads)
        multiply_share(
            thread, num_threads, tag, wide_tag, at.normed, sizes.hidden_stride, num_rows,
            weight[GATE_UP], weight[GATE_UP_BIAS], _vectors(2 * sizes.intermediate), hidden_links,
            sizes.width, at.gate_up, sizes.gate_up_stride,
        )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        for row in range(begin, end):
            gate_row(
                pointer(at.gate_up, tag) + row * sizes.gate_up_stride, sizes.intermediate,
                pointer(at.activated, tag) + row * sizes.activated_stride,
            )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        multiply_share(
            thread, num_threads, tag, wide_tag, at.activated, sizes.activated_stride, num_rows,
            weight[DOWN], weight[DOWN_BIAS], hidden_vectors, _links(sizes.intermediate, sizes.width),
            sizes.width, at.projected, sizes.hidden_stride,
        )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        _norm_share(
            thread, num_threads, tag, wide_tag, sizes, at, num_rows, at.projected, weight[NEXT_NORM]
        )
        arrivals = meet(counter, arrivals, num_threads)
    for row in range(begin, end):
        source = pointer(at.normed, tag) + row * sizes.hidden_stride
        target = pointer(out, tag) + places.rows[row] * sizes.hidden_stride
        for i in range(sizes.hidden_stride):
            store_one(target + i, load_one(source + i))
    meet(counter, arrivals, num_threads)


class NumbaForward:
    """A model's packed weights and the buffers of its rows.

    Attributes:
        inexact_reason, row_block: a row depends on itself alone, so blocks are of one row.
    """

    inexact_reason: str | None = None
    row_block: int | None = 1

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Takes the layers out of `weights` one by one."""
        self._dtype = weights.embedding.dtype
        self._wide = wide_dtype(self._dtype)
        self._cos, self._sin = cos, sin
        self._kept: list[torch.Tensor] = []  # what is known by its address only
        self._head = pack(weights.head, None)
        is_tied = weights.head is weights.embedding
        embedding = self._head.weight if is_tied else weights.embedding
        self._embedding = self._keep(embedding)
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
        self._sizes = _Sizes(
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
            scratch_bytes=scratch_size(config.head_dim) * self._wide.itemsize,
            vocab_vectors_stride=links * LANES * width if is_tied else 0,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
        )
        self._capacity = self._num_threads = 0
        self._compile(config)

    def _compile(self, config: ModelConfig) -> None:
        """Have all that a step runs compiled now, or read from disk, rather than in the first step."""
        shape = (config.num_layers, 2, 1, config.num_kv_heads, 2, config.head_dim)
        cache = KVCache(torch.zeros(shape, dtype=self._dtype), 1, "numba")
        zero = torch.zeros((1, 1), dtype=torch.int32)
        layout = LookaheadLayout(0, 2, 0)
        hidden = self.forward(zero, zero, layout, cache, zero[0], zero[0] + 1)
        largest_logit(self.logits(hidden), "numba")
        cache.commit(zero.long(), zero[0].long(), zero[0])

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
        batch, num_rows = tokens.shape
        self._make_room(batch * num_rows)
        paths = paths_of(layout)
        places = _Places(
            np.empty(batch * num_rows, dtype=np.int64),
            np.empty(batch * num_rows, dtype=np.int64),
            np.empty(batch + 1, dtype=np.int64),
            np.empty((batch, len(paths.first)), dtype=np.int64),
        )
        where = _Cache(cache.data.data_ptr(), cache.row_start, *cache.data.stride()[:4])
        out = torch.empty((batch, num_rows, self._sizes.hidden_stride), dtype=self._dtype)
        team_of(self._num_threads).run(
            _forward, TAGS[self._dtype], TAGS[near_dtype(self._dtype)], TAGS[self._wide],
            self._sizes, self._buffers, self._embedding, self._first_norm,
            self._layers, self._cos.data_ptr(), self._sin.data_ptr(), where,
            whole_numbers(tokens), whole_numbers(positions), whole_numbers(lengths),
            whole_numbers(live_rows), paths, places,
            out.data_ptr(),
        )  # fmt: skip
        return out[..., : self._sizes.hidden]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Llama.logits`."""
        rows = hidden.reshape(-1, self._head.in_size)
        if rows.shape[1] % self._sizes.width:
            rows = torch.nn.functional.pad(rows, (0, 1))
        out = rows.new_empty((rows.shape[0], self._head.num_vectors * LANES))
        product(team_of(torch.get_num_threads()), rows, self._head, out)
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

    def _make_room(self, num_rows: int) -> None:
        """Buffers for so many rows and as many threads as torch would use; they begin as zeros, and
        what fills rows up stays zero."""
        num_threads, sizes = torch.get_num_threads(), self._sizes
        if num_rows <= self._capacity and num_threads == self._num_threads:
            return
        self._capacity, self._num_threads = num_rows, num_threads
        num_q_heads = sizes.num_kv_heads * sizes.group

        def rows(stride: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows * stride, dtype=dtype)

        self._tensors = [
            rows(sizes.hidden_stride, self._dtype),
            rows(sizes.hidden_stride, self._dtype),
            rows(sizes.qkv_stride, self._dtype),
            rows(num_q_heads * sizes.head_stride, self._dtype),
            rows(num_q_heads * sizes.head_stride, self._wide),
            rows(num_q_heads, self._wide),
            rows(num_q_heads, self._wide),
            rows(sizes.attended_stride, self._dtype),
            rows(sizes.hidden_stride, self._dtype),
            rows(sizes.gate_up_stride, self._dtype),
            rows(sizes.activated_stride, self._dtype),
            torch.zeros(num_threads * sizes.scratch_bytes, dtype=torch.uint8),
        ]
        self._buffers = _Buffers(*(tensor.data_ptr() for tensor in self._tensors))
