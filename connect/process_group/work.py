"""MooncakeWork: torch's handle of a call that may still run, and the thread that runs calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from net.collectives.errors import RanksGone
from net.collectives.ticket import Ticket


class MooncakeWork(dist.Work):
    """`give_up` cancels the operation after `timeout_s`; without it, the operation has a deadline of its own."""

    def __init__(
        self,
        ticket: Ticket,
        tensors: list[Tensor],
        finish: Callable[[], None] | None = None,
        give_up: Callable[[], object] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self.ticket, self._tensors = ticket, tensors
        self._finish, self._give_up, self._timeout_s = finish, give_up, timeout_s
        self._lock = threading.Lock()
        self._future: Any = None  # torch.futures.Future[list[Tensor]]

    def is_completed(self) -> bool:
        return self.ticket.ended()

    def is_success(self) -> bool:
        return self.ticket.ended() and self.ticket.error is None

    def exception(self) -> BaseException | None:
        return self.ticket.error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises the error of the call; TimeoutError after `timeout`, with the call still running."""
        if timeout is not None and timeout.total_seconds() > 0:
            if not self.ticket.wait(timeout.total_seconds()):
                raise TimeoutError(f"the call did not end within {timeout}")
        elif self._give_up is not None and not self.ticket.wait(self._timeout_s):
            self._give_up()
        self.ticket.wait()
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self.ticket.source

    def _source_rank(self) -> int:
        return self.ticket.source

    def get_future(self) -> Any:
        with self._lock:
            if self._future is not None:
                return self._future
            future: Any = torch.futures.Future()
            self._future = future

        def ended(ticket: Ticket) -> None:
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._tensors)

        self.ticket.then(ended)
        return future


class Runner:
    """Runs the calls of a group in their order: in the caller's thread if it waits for the call and none is before it,
    otherwise in a thread of its own, which starts at the first such call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Ticket] | None] = queue.SimpleQueue()
        self._queued = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, call: Callable[[], None], tensors: list[Tensor], is_async: bool) -> MooncakeWork:
        ticket = Ticket()
        with self._lock:
            if self._closed:
                raise RanksGone("the process group has been shut down")
            inline = not is_async and not self._queued
            if not inline:
                self._queued += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="mooncake-pg", daemon=True)
                    self._thread.start()
                self._queue.put((call, ticket))
        if inline:
            self._do(call, ticket)
        return MooncakeWork(ticket, tensors)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._do(*item)
            with self._lock:
                self._queued -= 1

    @staticmethod
    def _do(call: Callable[[], None], ticket: Ticket) -> None:
        try:
            call()
        except BaseException as error:
            ticket.end(error)
        else:
            ticket.end()


def is_async(options: Any) -> bool:
    """Whether the caller goes on before the call has ended; yes where torch does not say."""
    return bool(getattr(options, "asyncOp", True))
