"""The in-memory network of fakes.py under virtual time: delays, cuts and pauses, by seed, of any length for no time."""

from __future__ import annotations

import asyncio
import selectors


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock stands while something runs and jumps to the next timer when nothing does."""

    def __init__(self) -> None:
        self._clock = 1000.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._clock

    def jump(self, seconds: float) -> None:
        self._clock += seconds


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("everything waits, and for nothing that will come")
        if timeout > 0:
            self._loop.jump(timeout)
        return super().select(0)


def run(work):
    """The result of a coroutine, on a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class Weather:
    """What the network does to each message and each transfer: `cross` is awaited by it in both directions."""

    def __init__(self, rng, delay_s=0.01) -> None:
        self._rng = rng
        self.delay_s = delay_s
        self._cuts = set()  # (from, to)
        self._healed = asyncio.Event()
        self._paused = {}  # node -> until when it stands still

    def cut(self, some, others) -> None:
        """What they send each other until `heal` is lost without a word, or comes after it: TCP sends again."""
        self._cuts |= {pair for a in some for b in others for pair in ((a, b), (b, a))}

    def heal(self) -> None:
        self._cuts.clear()
        self._healed.set()
        self._healed = asyncio.Event()

    def pause(self, node, seconds) -> None:
        """It reads and sends nothing meanwhile; what is sent to it waits."""
        self._paused[node] = asyncio.get_running_loop().time() + seconds

    async def cross(self, source, target) -> None:
        if source != target:
            await asyncio.sleep(self._rng.random() * self.delay_s)
        for node in (source, target):
            await asyncio.sleep(max(0.0, self._paused.get(node, 0.0) - asyncio.get_running_loop().time()))
        if (source, target) in self._cuts:
            lost = self._rng.random() < 0.5
            await (asyncio.Event() if lost else self._healed).wait()
