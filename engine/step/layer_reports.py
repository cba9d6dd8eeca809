"""Layers of a step reported once the device has computed them.

A model queues all its layers long before the device is through with the first, so what is queued says nothing about
what may be copied. An event behind each layer does: a thread waits for one after the other. Copies out need not wait in
their own stream then, and a layer leaves while the next ones are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from engine.model.gpu import Event, Gpu


class LayerReports:
    """Of the steps of one runner, which calls it in one thread."""

    def __init__(self, gpu: Gpu, kv_pool: Tensor) -> None:
        """kv_pool: on the device that computes."""
        self._gpu = gpu
        self._kv_pool = kv_pool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layers")
        self._reports: list[Future[None]] = []

    def behind(self, on_layer: Callable[[int], None]) -> Callable[[int], None]:
        """To be called once a layer is queued on the current stream: `on_layer` is called, in another thread and in
        order, once the device has computed it."""

        def queued(layer: int) -> None:
            self._reports.append(self._thread.submit(_report, self._gpu.mark(self._kv_pool), on_layer, layer))

        return queued

    def finish(self) -> None:
        """All layers of the step have been reported when this returns. Raises what the device or a report raised."""
        reports, self._reports = self._reports, []
        for report in reports:
            report.result()


def _report(event: Event, on_layer: Callable[[int], None], layer: int) -> None:
    event.synchronize()
    on_layer(layer)
