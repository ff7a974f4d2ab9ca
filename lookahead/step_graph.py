"""A step as a recorded program that the host starts, and whose outcome it reads a step later.

The host neither allocates nor waits between two steps: it starts one, and then reads what the one
before emitted. Knows which recorded program serves which committed lengths and rows, and which numbers
belong to whom; knows nothing of text and of stops. What needs a GPU is in `CudaRecorder` and
`CudaHostCopy`.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from tqdm import tqdm

from lookahead.row_budget import RowBudget, StepShape
from lookahead.step import Step
from lookahead.step_numbers import StepNumbers

# The first bucket of committed lengths; each is twice the one before.
SHORTEST_BUCKET = 512


class HostCopy(Protocol):
    """Room on the host for a copy of one device tensor."""

    def begin(self) -> None:
        """Copy what the tensor holds once the work given to the device so far is done; do not wait."""

    def read(self) -> list[list[int]]:
        """Wait for the copy that was begun last, and for nothing behind it."""


class Recorder(Protocol):
    """How work is recorded and its outcome fetched on a kind of device."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once, record, and return what runs it again on the same memory."""

    def host_copy(self, source: torch.Tensor) -> HostCopy:
        """Room for copies of `source`, [B, M] int."""


class CudaHostCopy:
    """A copy in pinned memory: one from memory that can be swapped out would make the host wait."""

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self._target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._copied = torch.cuda.Event()

    def begin(self) -> None:
        """See `HostCopy`; the work is that of the current stream."""
        self._target.copy_(self._source, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._source.device))

    def read(self) -> list[list[int]]:
        """See `HostCopy`."""
        self._copied.synchronize()
        return self._target.tolist()


class CudaRecorder:
    """CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder`. What is compiled, chosen or allocated at a first call is so in the run before
        the capture, on the capture's own stream."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                run()
        return graph.replay

    def host_copy(self, source: torch.Tensor) -> HostCopy:
        """See `Recorder`."""
        return CudaHostCopy(source)


def buckets(max_length: int) -> list[int]:
    """What committed lengths are bounded by, ascending; the last is `max_length`."""
    found = []
    bound = SHORTEST_BUCKET
    while bound < max_length:
        found.append(bound)
        bound *= 2
    return [*found, max_length]


class PipelinedStep:
    """A step of fixed shape, started without waiting and read one step late: a `StepRunner`.

    Requests are begun with `start` and ended early with `stop`, so that what the step in flight emits
    for the sequence is dropped. One thread, and one stream of the device, use it.

    Attributes:
        capture_seconds: how long it took to run and record the step for every bucket and shape.
    """

    def __init__(self, step: Step, recorder: Recorder | None = None) -> None:
        """Records `step` for every bucket and shape; no sequence of it may be running.

        Raises:
            ValueError: the step looks at data, or a sequence is running.
        """
        if not step.fixed_shape:
            raise ValueError("step: expected one of fixed shape, got one that leaves rows out")
        if not bool(step.state.finished.all()):
            raise ValueError(
                "step: expected no sequence to be running while it is recorded, got finished = "
                f"{step.state.finished.tolist()}"
            )
        self.step = step
        recorder = CudaRecorder(step.model.device) if recorder is None else recorder
        batch = step.state.lengths.shape[0]
        # What the host knows lengths to be at most, and which sequences run, up to the last step that
        # it read.
        self._lengths = [0] * batch
        self._running: set[int] = set()
        step.state.end()
        self._packing = step.packing
        # Outside of what is recorded: it stays.
        size = (batch, self._packing.size)
        self._numbers = torch.zeros(size, dtype=torch.int64, device=step.model.device)
        # One is read while the next step's numbers go to the other.
        self._copies = [recorder.host_copy(self._numbers) for _ in range(2)]
        self._in_flight: HostCopy | None = None
        self._dropped: set[int] = set()
        self._buckets = buckets(step.kv_cache.max_length)
        self._programs: dict[tuple[int, StepShape], Callable[[], None]] = {}
        began = time.perf_counter()
        # The longest and widest first: the others fit into the memory that it needed.
        keys = [(longest, shape) for longest in self._buckets[::-1] for shape in step.shapes]
        for key in tqdm(keys, "capturing", unit="graph", leave=False, disable=None):
            self._programs[key] = recorder.record(partial(self._run, *key))
        self.capture_seconds = time.perf_counter() - began

    @torch.inference_mode()
    def _run(self, longest: int, shape: StepShape) -> None:
        """One step, and its numbers side by side for a single copy."""
        output = self.step.run(shape=shape, longest=longest)
        self._numbers.copy_(self._packing.pack(output))

    def start(
        self,
        sequence: int,
        prompt: list[int],
        limit: int,
        eos_ids: tuple[int, ...],
        in_pool: int = 0,
    ) -> None:
        """Begin a request; see `Step.start`. What the step in flight says of the sequence is dropped.

        The prompt is, or will be, in the cache before the next step is started.
        """
        if self._in_flight is not None:
            self._dropped.add(sequence)
        self._lengths[sequence] = len(prompt) - 1
        self._running.add(sequence)
        self.step.start(sequence, prompt, limit, eos_ids, in_pool)

    @torch.inference_mode()
    def stop(self, sequence: int) -> None:
        """End a request from the host: later steps leave the sequence alone, and what the step in
        flight says of it is dropped."""
        if self._in_flight is not None:
            self._dropped.add(sequence)
            self._lengths[sequence] += self.step.path_rows
        self._running.discard(sequence)
        self.step.state.finished[sequence] = True

    def end(self) -> None:
        """End all requests. Waits for the step in flight, so that nothing of it is left to be read as
        the next request's."""
        self.drain()
        self._running.clear()
        self._lengths = [0] * len(self._lengths)
        self.step.state.end()

    def run(self, budget: RowBudget | None = None) -> StepNumbers | None:
        """Start a step; return the numbers of the one before, None if there is none to read.

        `budget` chooses the step's shape by what it was told of steps up to the one before the last. A
        step that is started when all sequences are over, because the host does not know it yet, emits
        nothing.
        """
        before, copy = self._in_flight, self._copies[0]
        dropped, self._dropped = self._dropped, set()
        shape = self.step.shapes[0]
        if budget is not None:
            shape = budget.choose([[0] * self.step.config.guesses] * len(self._running))
        self._programs[self._bucket(), shape]()
        copy.begin()
        self._in_flight = copy
        self._copies.reverse()
        return None if before is None else self._read(before, dropped)

    def drain(self) -> StepNumbers | None:
        """Start nothing; return the numbers of the step in flight, None if there is none."""
        before, self._in_flight = self._in_flight, None
        dropped, self._dropped = self._dropped, set()
        return None if before is None else self._read(before, dropped)

    def _bucket(self) -> int:
        """The least that no committed length can be above."""
        unread = 0 if self._in_flight is None else self.step.path_rows
        longest = min(max(self._lengths) + unread, self._buckets[-1])
        return min(bucket for bucket in self._buckets if bucket >= longest)

    def _read(self, copy: HostCopy, dropped: set[int]) -> StepNumbers:
        numbers = self._packing.unpack(copy.read(), dropped)
        for sequence, ids in enumerate(numbers.token_ids):
            self._lengths[sequence] += len(ids)
            if numbers.finished[sequence]:
                self._running.discard(sequence)
        return numbers
