"""A step as a recorded program that the host starts, and whose outcome it reads a step later.

The host neither allocates nor waits between two steps: it starts one, and then reads what the one
before emitted. Knows which recorded program serves which committed lengths, and which numbers belong to
whom; knows nothing of text and of stops. What needs a GPU is in `CudaRecorder` and `CudaHostCopy`.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from tqdm import tqdm

from lookahead.step import Step

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


class StepNumbers(NamedTuple):
    """What one step emitted, on the host.

    Attributes:
        token_ids: new tokens of each sequence, none for one that was over before.
        finished: whether each sequence is over, after the step.
        finite: whether the logits that were used are finite, for each sequence.

    Of a sequence that was stopped, or started anew, while the step ran nothing is said: no tokens, not
    finished, finite.
    """

    token_ids: list[list[int]]
    finished: list[bool]
    finite: list[bool]


def buckets(max_length: int) -> list[int]:
    """What committed lengths are bounded by, ascending; the last is `max_length`."""
    found = []
    bound = SHORTEST_BUCKET
    while bound < max_length:
        found.append(bound)
        bound *= 2
    return [*found, max_length]


class PipelinedStep:
    """A step of fixed shape, started without waiting and read one step late.

    Requests are begun with `start` and ended early with `stop`, so that what the step in flight emits
    for the sequence is dropped. One thread, and one stream of the device, use it.

    Attributes:
        capture_seconds: how long it took to run and record the step for every bucket.
    """

    def __init__(self, step: Step, recorder: Recorder | None = None) -> None:
        """Records `step` for every bucket; no sequence of it may be running.

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
        # What the host knows lengths to be at most, up to the last step that it read.
        self._lengths = [0] * batch
        step.state.lengths.zero_()
        # Emitted tokens, their count, finished, finite. Outside of what is recorded: it stays.
        size = (batch, step.path_rows + 3)
        self._numbers = torch.zeros(size, dtype=torch.int64, device=step.model.device)
        # One is read while the next step's numbers go to the other.
        self._copies = [recorder.host_copy(self._numbers) for _ in range(2)]
        self._in_flight: HostCopy | None = None
        self._dropped: set[int] = set()
        self._programs: dict[int, Callable[[], None]] = {}
        began = time.perf_counter()
        # The longest first: shorter ones fit into the memory that it needed.
        descending = buckets(step.kv_cache.max_length)[::-1]
        for longest in tqdm(descending, "capturing", unit="graph", leave=False, disable=None):
            self._programs[longest] = recorder.record(partial(self._run, longest))
        self.capture_seconds = time.perf_counter() - began

    @torch.inference_mode()
    def _run(self, longest: int) -> None:
        """One step, and its numbers side by side for a single copy."""
        output = self.step.run(longest=longest)
        told = [part.unsqueeze(1) for part in (output.counts, output.finished, output.finite)]
        parts = [part.long() for part in (output.emitted, *told)]
        torch.cat(parts, dim=1, out=self._numbers)

    def start(self, sequence: int, prompt: list[int], limit: int, eos_ids: tuple[int, ...]) -> None:
        """Begin a request; see `Step.start`. What the step in flight says of the sequence is dropped.

        The prompt is, or will be, in the cache before the next step is started.
        """
        if self._in_flight is not None:
            self._dropped.add(sequence)
        self._lengths[sequence] = len(prompt) - 1
        self.step.start(sequence, prompt, limit, eos_ids)

    @torch.inference_mode()
    def stop(self, sequence: int) -> None:
        """End a request from the host: later steps leave the sequence alone, and what the step in
        flight says of it is dropped."""
        if self._in_flight is not None:
            self._dropped.add(sequence)
            self._lengths[sequence] += self.step.path_rows
        self.step.state.finished[sequence] = True

    def run(self) -> StepNumbers | None:
        """Start a step; return the numbers of the one before, None if there is none to read.

        A step that is started when all sequences are over, because the host does not know it yet,
        emits nothing.
        """
        before, copy = self._in_flight, self._copies[0]
        dropped, self._dropped = self._dropped, set()
        self._programs[self._bucket()]()
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
        """The least that no committed length can be above, among those that were recorded."""
        unread = 0 if self._in_flight is None else self.step.path_rows
        longest = min(max(self._lengths) + unread, max(self._programs))
        return min(bucket for bucket in self._programs if bucket >= longest)

    def _read(self, copy: HostCopy, dropped: set[int]) -> StepNumbers:
        numbers = StepNumbers([], [], [])
        for sequence, (*emitted, count, is_finished, is_finite) in enumerate(copy.read()):
            is_dropped = sequence in dropped
            numbers.token_ids.append([] if is_dropped else emitted[:count])
            numbers.finished.append(bool(is_finished) and not is_dropped)
            numbers.finite.append(bool(is_finite) or is_dropped)
            if not is_dropped:
                self._lengths[sequence] += count
        return numbers
