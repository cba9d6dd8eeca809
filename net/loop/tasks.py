"""Background tasks. The program creates every task here, so that no failure is silent.

    spawn(work, "fence")          not awaited: its exception is reported immediately
    keep(run, "repair")           a loop of the node: restarted when it raises, a few times per minute at most; if it
                                  fails more often, it ends and the node leaves
    awaited(work)                 awaited: the caller gets its exception
    cancel_others(5.0)            at the end of a loop

"Reported" means a call of the event loop's exception handler. asyncio's own handler writes an error line; a node
installs a Supervisor (net/loop/supervisor.py), which also counts the failure and lets the node leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from net.loop.restarts import Restarts

T = TypeVar("T")

TASK = "background_task"  # keys of the handler's context: the name of the task,
FINAL = "final"  # and True if the node needs the task and it does not run any more


def spawn(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start work that is not awaited. The caller must keep the task, or asyncio may drop it."""
    task = awaited(work)
    task.add_done_callback(partial(_ended, name))
    return task


def keep(run: Callable[[], Awaitable[None]], name: str, restarts: Restarts | None = None) -> asyncio.Task[None]:
    """Keep `run` running until it returns or the task is cancelled."""
    return awaited(_kept(run, name, restarts or Restarts()))


def awaited(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that the caller awaits."""
    return asyncio.get_running_loop().create_task(work)


async def cancel_others(within_s: float) -> None:
    """Cancel all other tasks of this loop, which is about to stop, so that no thread waits for one for ever. Returns
    when they have ended, and after `within_s` in any case."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=within_s)


def tell(name: str, error: BaseException, pause_s: float | None, then: str = "the node leaves") -> None:
    """Report that the background work `name` raised `error`; it restarts after `pause_s` seconds, or never if None."""
    end = f"not started again: {then}" if pause_s is None else f"started again in {pause_s:g} s"
    context = {"message": f"background task {name!r} failed and is {end}", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context | {TASK: name, FINAL: pause_s is None})


async def _kept(run: Callable[[], Awaitable[None]], name: str, restarts: Restarts) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            await run()
            return
        except Exception as error:
            pause_s = restarts.failed(loop.time())
            tell(name, error, pause_s)
            if pause_s is None:
                return
        await asyncio.sleep(pause_s)


def _ended(name: str, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": f"background task {name!r} failed", "exception": error, TASK: name}
        task.get_loop().call_exception_handler(context)
