"""Weights as objects of the pooled store (--weights-from-store): a node without weights reads them from its peers.

    objects/weights/FINGERPRINT/DTYPE/NAME     a tensor, its bytes in C order
    objects/weights/FINGERPRINT/DTYPE          their names and shapes as JSON; written last

Chunks of objects are stored at their homes, like blocks, so every home is a source of its chunks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import orjson
import torch
from torch import Tensor

from cache.results import StoreError
from cache.store.objects import Objects
from engine.checkpoint.loop_calls import LoopCalls
from engine.checkpoint.weights import Reader, type_of
from engine.model.model_error import ModelError

log = logging.getLogger("mooncake.weights")

PATIENCE_S, AGAIN_S = 20.0, 1.0
"""A node that starts is busy: the others may take it for dead for a moment, and their homes refuse it until it has
refuted this. How long a part of the weights may be missing, and seconds between two tries."""


def prefix(fingerprint: str, dtype: str) -> str:
    """Name of the list of weights; the tensors' names follow it."""
    return f"objects/weights/{fingerprint}/{dtype}"


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.flatten().view(torch.uint8).numpy().data


class PooledWeights:
    """The pool as a source of weights (engine.checkpoint.weights.Reader), for threads other than the loop's."""

    def __init__(
        self, objects: Objects, calls: LoopCalls, fingerprint: str, dtype: str, shapes: Mapping[str, list[int]]
    ) -> None:
        self._objects = objects
        self._calls = calls
        self._name = prefix(fingerprint, dtype)
        self._dtype = getattr(torch, dtype)
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}

    @classmethod
    def find(cls, objects: Objects, calls: LoopCalls, fingerprint: str, dtype: str) -> PooledWeights | None:
        """The pool's weights; None if the pool has no list of them."""
        listed = calls.wait(objects.get(prefix(fingerprint, dtype)))
        return None if listed is None else cls(objects, calls, fingerprint, dtype, orjson.loads(listed))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Raises ModelError if the pool does not have a part of the tensor for PATIENCE_S."""
        out = torch.empty(math.prod(self._shapes[name]), dtype=type_of(name, self._dtype))
        memory = bytes_of(out)
        give_up_at = time.monotonic() + PATIENCE_S
        while self._calls.wait(self._objects.get_into(f"{self._name}/{name}", memory)) != len(memory):
            if time.monotonic() >= give_up_at:
                raise ModelError(
                    f"the pooled store has lost a part of the weights ({name}): start a node with --weights-from-store "
                    "that has them on disk, or give --model a directory with them"
                )
            log.info("a part of the weights (%s) is not in the pooled store now: once more", name)
            time.sleep(AGAIN_S)
        return out.view(self._shapes[name])


async def publish(objects: Objects, fingerprint: str, dtype: str, opened: AbstractContextManager[Reader]) -> None:
    """Put missing tensors into the pool, one at a time to limit memory. Runs in the background of a serving node:
    errors are only logged, because later nodes can still load from disk."""
    name, loop = prefix(fingerprint, dtype), asyncio.get_running_loop()

    def read(reader: Reader, tensor: str) -> memoryview:
        return bytes_of(reader.read(tensor).to(type_of(tensor, getattr(torch, dtype))).contiguous())

    try:
        with ThreadPoolExecutor(1, thread_name_prefix="publish-weights") as thread, opened as reader:
            shapes = dict(reader.shapes())
            for tensor in shapes:
                if not await objects.exists(f"{name}/{tensor}"):
                    await objects.put(f"{name}/{tensor}", await loop.run_in_executor(thread, read, reader, tensor))
            await objects.put(name, orjson.dumps(shapes))
        log.info("the weights are in the pooled store as %s", name)
    except (StoreError, ModelError, OSError) as error:
        log.warning("the weights are not in the pooled store: %s", error)
