"""A GPU whose work is done as late as CUDA may do it, in any order that CUDA may choose: an engine.model.gpu.Gpu over
ordinary tensors. Memory that is read too early holds POISON, or what lay there before.

Inside `with gpu:` every operation on a tensor of the device, also a copy from or to page-locked host memory, is put
into a stream and runs when something waits for it: an event, or a read. The seed says which
other operations run at that time. A host buffer that is filled again too early shows as wrong bytes, one that is read
too early as POISON. Errors:

    a copy of memory that is not page-locked     it would wait for the stream, in the middle of the event loop
    memory of one stream used on another         the allocator would give it to others too early
    waiting while a graph is recorded            CUDA refuses it

Tensors are on the device when they were made by `with gpu.making(device)`, or by operations on such tensors.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

POISON = 0xA5
READS = ("_local_scalar_dense", "equal", "is_nonzero")


class TooEarly(AssertionError):
    """What CUDA would do wrongly, or slowly."""


@dataclass(eq=False)
class LateStream:
    """Operations in the order they were queued; `ran` of them have run."""

    gpu: LateGpu
    device: int
    ops: list[Callable[[], None]] = field(default_factory=list)
    waits: dict[int, LateEvent] = field(default_factory=dict)  # by position
    ran: int = 0

    def wait_stream(self, other: LateStream) -> None:
        self.wait_event(LateEvent(other, len(other.ops)))

    def wait_event(self, event: LateEvent) -> None:
        with self.gpu.lock:
            self.waits[len(self.ops)] = event
            self.ops.append(lambda: None)


@dataclass(eq=False)
class LateEvent:
    stream: LateStream
    position: int

    def query(self) -> bool:
        with self.stream.gpu.lock:
            self.stream.gpu.stray()
            return self.stream.ran >= self.position

    def synchronize(self) -> None:
        self.stream.gpu.run_to(self)


@dataclass(eq=False)
class Graph:
    ops: list[Callable[[], None]] = field(default_factory=list)


class LateGpu(TorchDispatchMode):
    asynchronous = True

    def __init__(self, seed: int, strays: int = 2) -> None:
        """strays: how many operations nobody waits for may run each time that something is waited for."""
        super().__init__()
        self.lock = threading.RLock()
        self.copies = 0  # operations that move bytes between host and device
        self._rng = random.Random(seed)
        self._strays = strays
        self._storages: dict[int, tuple[Any, int, LateStream | None]] = {}  # address -> itself, device, whose it is
        self._kept: list[Tensor] = []  # so that no address is used twice
        self._locked: list[tuple[int, int]] = []  # page-locked host memory: (begin, end)
        self._streams: list[LateStream] = []
        self._defaults: dict[int, LateStream] = {}
        self._mine = threading.local()  # what is current in a thread
        self._graph: Graph | None = None  # being recorded
        self._scratch: list[Tensor] = []  # memory of recorded operations, which all graphs share

    # --- engine.model.gpu.Gpu

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages

    def place(self, like: Tensor) -> str:
        return f"late:{self.device_of(like)}"

    def stream(self, like: Tensor) -> LateStream:
        return self._stream(self.device_of(like))

    @contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        before = self._current()
        self._mine.streams = {**before, stream.device: stream}
        try:
            yield
        finally:
            self._mine.streams = before

    def mark(self, like: Tensor) -> LateEvent:
        if self._graph is not None:
            raise TooEarly("an event while a graph is recorded")
        stream = self.current(self.device_of(like))
        return LateEvent(stream, len(stream.ops))

    def settle(self, like: Tensor) -> None:
        for stream in [one for one in self._streams if one.device == self.device_of(like)]:
            self.run_to(LateEvent(stream, len(stream.ops)))

    def buffer(self, count: int, like: Tensor) -> Tensor:
        made = self._poisoned(torch.empty(count, dtype=torch.int64))
        self._lock_pages(made)
        return made

    def index(self, rows: Sequence[int], like: Tensor) -> Tensor:
        host = torch.tensor(rows, dtype=torch.int64)
        self._lock_pages(host)
        return self.move(host, like)

    def move(self, tensor: Tensor, like: Tensor) -> Tensor:
        device = self.device_of(like)
        if self.holds(tensor) and self.device_of(tensor) == device:
            return tensor
        target = self._new(tensor.shape, tensor.dtype, device, self.current(device))
        self._copy(target, tensor, non_blocking=True)
        return target

    def pin(self, region: Any) -> None:
        span = region.address, region.address + region.nbytes
        if span in self._locked:
            raise RuntimeError("cudaHostRegister failed with CUDA error 712")
        self._locked.append(span)

    def unpin(self, region: Any) -> None:
        self._locked.remove((region.address, region.address + region.nbytes))

    # --- for tests

    @contextmanager
    def making(self, device: int = 0) -> Iterator[None]:
        """Tensors that are made inside are on the device."""
        self._mine.making = device
        try:
            yield
        finally:
            self._mine.making = None

    def read(self, tensor: Tensor) -> Tensor:
        """Its content behind everything that its current stream has been given, as a blocking copy has it."""
        self.mark(tensor).synchronize()
        with self._plainly():
            return tensor.clone()

    def peek(self, tensor: Tensor) -> Tensor:
        """What lies there now."""
        with self._plainly():
            return tensor.clone()

    def finish(self) -> None:
        """Run everything."""
        for stream in self._streams:
            self.run_to(LateEvent(stream, len(stream.ops)))

    def recorder(self, run: Callable[[], None]) -> Callable[[], None]:
        """Like engine.model.graphs.CudaRecorder: all graphs share one memory for their intermediate results."""
        run()
        graph = self._graph = Graph()
        try:
            run()
        finally:
            self._graph = None

        def launch() -> None:
            for tensor in self._scratch:
                self._poisoned(tensor)
            for op in graph.ops:
                op()

        return lambda: self._queue(self.current(0), launch)

    def device_of(self, tensor: Tensor) -> int:
        return self._storages[tensor.untyped_storage().data_ptr()][1]

    def current(self, device: int) -> LateStream:
        if device not in self._defaults:
            self._defaults[device] = self._stream(device)
        return self._current().get(device) or self._defaults[device]

    # --- running

    def run_to(self, event: LateEvent) -> None:
        """Everything that the event is behind, and what else may run."""
        if self._graph is not None:
            raise TooEarly("a wait while a graph is recorded")
        with self.lock:
            self.stray()
            self._force(event)

    def stray(self) -> None:
        """A few operations that nobody waits for."""
        for _ in range(self._rng.randint(0, self._strays)):
            ready = [one for one in self._streams if one.ran < len(one.ops) and not self._waits(one)]
            if ready:
                self._step(self._rng.choice(ready))

    def _waits(self, stream: LateStream) -> bool:
        event = stream.waits.get(stream.ran)
        return event is not None and event.stream.ran < event.position

    def _force(self, event: LateEvent) -> None:
        stream = event.stream
        while stream.ran < event.position:
            if (behind := stream.waits.get(stream.ran)) is not None:
                self._force(behind)
            self._step(stream)

    def _step(self, stream: LateStream) -> None:
        with self._plainly():
            stream.ops[stream.ran]()
        stream.ran += 1

    def _queue(self, stream: LateStream, op: Callable[[], None]) -> None:
        if self._graph is not None:
            self._graph.ops.append(op)
            return
        with self.lock:
            stream.ops.append(op)

    # --- operations of torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(self._mine, "plain", False):
            return func(*args, **kwargs)
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        ours = [one for one in tensors if self.holds(one)]
        schema = func._schema
        writes = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
        if not ours:
            return self._made(func(*args, **kwargs))
        if not writes and any(one.alias_info is not None for one in schema.returns):
            return func(*args, **kwargs)  # a view
        name = schema.name.removeprefix("aten::")
        if name == "copy_":
            self._copy(args[0], args[1], kwargs.get("non_blocking", len(args) > 2 and args[2]))
            return args[0]
        if name in READS:
            self.run_to(self.mark(ours[0]))
            with self._plainly():
                return func(*args, **kwargs)
        return self._operation(func, args, kwargs, tensors, writes)

    def _operation(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], writes: bool) -> Any:
        """Everything but views, copies and reads: on the one device of its tensors."""
        strangers = [one for one in tensors if not self.holds(one) and one.dim()]
        devices = {self.device_of(one) for one in tensors if self.holds(one)}
        if strangers or len(devices) > 1:
            raise TooEarly(f"{func} over tensors of several devices")
        stream = self.current(devices.pop())
        self._check_owner(stream, tensors)
        if writes:
            self._queue(stream, lambda: func(*args, **kwargs))
            return kwargs["out"] if "out" in kwargs else args[0]

        with self._plainly():
            shapes = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        results = [self._new(one.shape, one.dtype, stream.device, stream) for one in _listed(shapes)]

        def run() -> None:
            for target, found in zip(results, _listed(func(*args, **kwargs)), strict=True):
                target.copy_(found)

        self._queue(stream, run)
        return results[0] if isinstance(shapes, Tensor) else results

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        ends = [one for one in (target, source) if self.holds(one)]
        if len(ends) < 2:
            host = source if ends[0] is target else target
            self.copies += 1
            if self._graph is not None:
                raise TooEarly("a copy from or to the host while a graph is recorded")
            if not non_blocking or not self._is_locked(host):
                raise TooEarly(f"a copy of {host.numel()} elements of host memory that waits for the stream")
            if host is target:
                self._poisoned(target)
        stream = self.current(self.device_of(ends[-1]))  # torch copies on the source's device
        other = self.current(self.device_of(ends[0]))
        self._check_owner(stream, [one for one in ends if self.device_of(one) == stream.device])
        if other is not stream:
            stream.wait_stream(other)

        def run() -> None:
            target.copy_(source)

        self._queue(stream, run)
        if other is not stream:
            other.wait_stream(stream)

    # --- memory

    def _made(self, made: Any) -> Any:
        device = getattr(self._mine, "making", None)
        if device is not None:
            for one in _listed(made):
                self._own(one, device, None)
        return made

    def _new(self, shape: Any, dtype: torch.dtype, device: int, stream: LateStream) -> Tensor:
        with self._plainly():
            made = self._poisoned(torch.empty(shape, dtype=dtype))
        if self._graph is not None:
            self._scratch.append(made)
        return self._own(made, device, stream)

    def _own(self, tensor: Tensor, device: int, stream: LateStream | None) -> Tensor:
        storage = tensor.untyped_storage()
        self._kept.append(tensor)
        self._storages[storage.data_ptr()] = storage, device, stream
        return tensor

    def _check_owner(self, stream: LateStream, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            owner = self._storages[tensor.untyped_storage().data_ptr()][2] if self.holds(tensor) else None
            if owner is not None and owner is not stream:
                raise TooEarly("memory that was taken on one stream is used on another")

    def _poisoned(self, tensor: Tensor) -> Tensor:
        with self._plainly():
            flat = torch.full((tensor.numel() * tensor.element_size(),), POISON, dtype=torch.uint8)
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
        return tensor

    def _lock_pages(self, tensor: Tensor) -> None:
        self._kept.append(tensor)
        self._locked.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))

    def _is_locked(self, tensor: Tensor) -> bool:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(first <= begin and end <= last for first, last in self._locked)

    # --- threads

    def _stream(self, device: int) -> LateStream:
        made = LateStream(self, device)
        self._streams.append(made)
        return made

    def _current(self) -> dict[int, LateStream]:
        found: dict[int, LateStream] = getattr(self._mine, "streams", {})
        return found

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """Operations of this thread are done at once."""
        before, self._mine.plain = getattr(self._mine, "plain", False), True
        try:
            yield
        finally:
            self._mine.plain = before


def _meta(one: Any) -> Any:
    if not isinstance(one, Tensor):
        return one
    return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")


def _listed(made: Any) -> list[Tensor]:
    return [one for one in tree_flatten(made)[0] if isinstance(one, Tensor)]
