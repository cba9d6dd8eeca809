"""Reports each layer of a step as soon as the device has computed it.

A model queues all its layers long before the device finishes the first, so a queued layer is not yet ready to be
copied. An event after each layer marks the time, and a thread waits for these events in order. Copies out then need
not wait in their own stream, and a layer leaves while the device computes the next ones.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from engine.model.gpu import Event, Gpu


class LayerReports:
    """Layer reports for the steps of one runner, which calls this from one thread."""

    def __init__(self, gpu: Gpu, kv_pool: Tensor) -> None:
        """kv_pool: a tensor on the computing device."""
        self._gpu = gpu
        self._kv_pool = kv_pool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layers")
        self._reports: list[Future[None]] = []

    def behind(self, on_layer: Callable[[int], None]) -> Callable[[int], None]:
        """A function to call when a layer has been queued on the current stream. When the device has computed the
        layer, another thread calls `on_layer`, in layer order."""

        def queued(layer: int) -> None:
            self._reports.append(self._thread.submit(_report, self._gpu.mark(self._kv_pool), on_layer, layer))

        return queued

    def finish(self) -> None:
        """Wait until all layers of the step have been reported. Raises the errors of the device and of `on_layer`."""
        reports, self._reports = self._reports, []
        for report in reports:
            report.result()


def _report(event: Event, on_layer: Callable[[int], None], layer: int) -> None:
    event.synchronize()
    on_layer(layer)
