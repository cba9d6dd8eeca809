"""LayeredWeights: a model's weights, read from their files only when the model takes them.

A model that does not fit into memory is made layer by layer. The weights of one layer are read together, in several
threads, when the first of them is taken.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.quantized_weights import Reading
from engine.checkpoint.weights import check, shapes
from engine.model.ops.quantized import Weight

Shape = tuple[int, ...]


class LayeredWeights:
    """An engine.model.decoder.Weights: `pop` takes a weight, which is then gone."""

    def __init__(
        self,
        sizes: Mapping[str, Shape],
        read: Callable[[str], Weight],
        threads: ThreadPoolExecutor,
        took: Callable[[str], None],
    ) -> None:
        """`sizes`: the names and shapes; `took(name)` is called for each weight that is taken."""
        self._left, self._read, self._threads, self._took = dict(sizes), read, threads, took
        self._there: dict[str, Weight] = {}

    def __contains__(self, name: object, /) -> bool:
        return name in self._left

    def __iter__(self) -> Iterator[str]:
        return iter(self._left)

    def __len__(self) -> int:
        return len(self._left)

    def pop(self, name: str, /) -> Weight:
        """Raises KeyError, and what reading raises."""
        if name not in self._left:
            raise KeyError(name)
        if name not in self._there:
            names = [other for other in self._left if _layer(other) == _layer(name)]
            self._there.update(zip(names, self._threads.map(self._read, names), strict=True))
        del self._left[name]
        self._took(name)
        return self._there.pop(name)


@contextmanager
def open_layered(
    source: ModelSource, reading: Reading, dtype: torch.dtype, progress: Callable[[int, int], None]
) -> Iterator[LayeredWeights]:
    """The weights of `source`, open while the context lasts. `progress` as weights.load has it. Raises ModelError."""
    sizes = shapes(source.config)
    total, done = dtype.itemsize * sum(map(math.prod, sizes.values())), 0

    def took(name: str) -> None:
        nonlocal done
        done += dtype.itemsize * math.prod(sizes[name])
        progress(done, total)

    with reading.opened as reader, ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as threads:
        check(source, sizes, reader)
        yield LayeredWeights(sizes, lambda name: reading.take(reader, name), threads, took)


def _layer(name: str) -> str:
    """layers.3.q -> layers.3; a weight outside layers is alone."""
    return name.rpartition(".")[0] if name.startswith("layers.") else name
