"""The requests that hold KV on a node: prompts that it computes, running ones, and those whose KV waits for room.

Each prompt that is computed and each running request has one of the node's seats, as in engine/core/seats.py: a prompt
starts when there is a seat, and room in the node's arena for its KV, and keeps both until it leaves the node. Where
nobody knows how long its answer gets, its KV may outgrow the arena: then prompts that wait give their prefixes back,
and after them the last one in the queue's order is preempted, and computes again what is not in the arena by then.
tests/lab/simulator/test_real_batcher.py holds all of this against the engine's batcher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lab.simulator.arena.accounts import Arena
from lab.simulator.job import Job
from lab.simulator.lengths import Lengths
from lab.simulator.models.step_models import StepModel


class Batch:
    """Seats of one node, and what its requests hold in its arena."""

    def __init__(self, model: StepModel, lengths: Lengths, arena: Arena) -> None:
        self.running: list[Job] = []
        self.joining: list[Job] = []  # their KV is here, but there is no room yet
        self.computing: dict[Job, None] = {}  # prompts with a seat
        self.promised_tokens = 0  # KV of all requests placed here to decode
        self.context = 0  # KV tokens that a step reads
        self.held_s = 0.0  # time that decode waits for prompts (prefill-first)
        self._model, self._lengths, self._arena = model, lengths, arena
        self._promises: dict[Job, int] = {}
        self._reserved: dict[Job, None] = {}  # prompts that are computed elsewhere, for which there is room kept
        self._behind: dict[Job, float] = {}  # tokens whose KV the draft model has to compute, oldest first

    @property
    def promised(self) -> int:
        """Requests placed here to decode, including the running ones."""
        return len(self._promises)

    def __contains__(self, job: Job) -> bool:
        """Whether the job's KV is here."""
        return job in self.joining or job in self.running

    def promise(self, job: Job) -> None:
        """The job will decode here."""
        self._promises[job] = self._model.held_tokens(job.input_tokens + self._lengths.expected(job))
        self.promised_tokens += self._promises[job]

    @property
    def held_tokens(self) -> int:
        """KV memory of all requests here."""
        return self._arena.used

    def seat(self, job: Job) -> bool:
        """Give a prompt a seat and memory, if both are left; one that would be alone here always starts."""
        tokens = self._kv_tokens(job)
        if (self.running or self.computing) and not self._has_room(job, tokens):
            self._arena.find(job, job.blocks, min(job.goal, job.input_tokens - 1))
            if not self._has_room(job, tokens):
                return False
        self._reserved.pop(job, None)
        self._take(job, tokens)
        self.computing[job] = None
        return True

    def reserve(self, job: Job) -> bool:
        """Keep memory for the KV of a prompt that another node computes, if it is left. It takes no seat. What would
        be alone here always gets it."""
        tokens = self._kv_tokens(job)
        if self._holds and self._arena.lacks(job, tokens) > self._arena.left:
            return False
        self._reserved[job] = None
        self._take(job, tokens)
        return True

    def unseat(self, job: Job) -> None:
        """The prompt is no longer computed here, and decodes elsewhere."""
        if job in self.computing:
            del self.computing[job]
            self._arena.drop(job)

    def release(self, job: Job) -> None:
        """The job no longer decodes here, or was lost before."""
        self.computing.pop(job, None)
        self._reserved.pop(job, None)
        self._arena.drop(job)
        self.promised_tokens -= self._promises.pop(job, 0)

    def cancel(self, job: Job) -> None:
        """Drop the job and its KV."""
        if job in self.running:
            self._leave(job)
        if job in self.joining:
            self.joining.remove(job)
        self.release(job)

    def clear(self) -> None:
        """The node lost its memory."""
        self._arena.drop_all()
        self._promises.clear()
        self._reserved.clear()
        self._behind.clear()
        self.computing.clear()
        self.running, self.joining = [], []
        self.promised_tokens, self.context, self.held_s = 0, 0, 0.0

    def admit(self, now: float) -> None:
        """Start the joining requests that were computed here and keep their seat, then those whose memory was reserved,
        then as many others as there is room for."""
        for job in [job for job in self.joining if job in self.computing]:
            del self.computing[job]
            self._start(now, job)
        for job in [job for job in self.joining if job in self._reserved]:
            if self._seats_left > 0:
                del self._reserved[job]
                self._start(now, job)
        while self.joining and self._has_room(self.joining[0], self._kv_tokens(self.joining[0])):
            self._start(now, self.joining[0])

    def _start(self, now: float, job: Job) -> None:
        self.joining.remove(job)
        self._take(job, self._kv_tokens(job))
        self.context += job.context
        if math.isnan(job.joined):
            job.joined = now
        if self._model.draft_size:
            self._behind[job] = job.context
        self.running.append(job)

    @property
    def _seats_left(self) -> int:
        return self._model.max_batch - len(self.running) - len(self.computing)

    @property
    def _holds(self) -> bool:
        """Whether a request holds memory that it does not give back while it waits."""
        return bool(self.running or self.computing or self._reserved)

    def _has_room(self, job: Job, tokens: int) -> bool:
        """Whether there are a seat and so much memory for the job, and some for the next tokens of all."""
        if self._seats_left <= 0:
            return False
        growth = 0 if self._lengths.known else len(self.running) + 1
        return not self._holds or self._arena.lacks(job, tokens) + growth <= self._arena.left

    def advance(self, now: float, steps: int, last_s: float, begun: float, first_s: float) -> list[Job]:
        """Give every running request `steps` tokens since `begun`; the first took first_s, the last last_s. Returns the
        requests that have ended."""
        done = []
        mean_s = (now - begun) / steps
        for job in self.running:
            # The gap after the first token includes the hand-over.
            gap = begun + first_s - job.prefilled if job.decoded == 1 else self.held_s + first_s
            if not math.isnan(job.paused):  # it came from another node after its last token
                gap, job.paused = begun + first_s - job.paused, math.nan
            job.longest_gap = max(job.longest_gap, gap)
            job.gaps.append((1, gap))
            if steps > 1:
                job.gaps.append((steps - 1, mean_s))
            job.decoded += steps
            if not self._lengths.known:
                self._grow(job)
            job.longest_gap = max(job.longest_gap, last_s)
            if job.decoded >= job.output_tokens:
                done.append(job)
        self.held_s = 0.0
        self.context += steps * len(self.running)
        for job in done:
            self._leave(job)
            self.release(job)
            job.finished = now
        if not self._lengths.known:
            self._arena.grown()
        return done

    # --- KV of a draft model

    def catching_up(self) -> tuple[int, float]:
        """(equal steps from now on, seconds that each is longer): the draft model computes its KV of the oldest request
        that lacks some. (0, 0.0): nothing is lacking."""
        if not self._behind:
            return 0, 0.0
        job, left = next(iter(self._behind.items()))
        each = min(left, self._model.draft_tokens)
        return max(1, int(left // self._model.draft_tokens)), each * self._model.draft_token_s(job.context)

    def caught_up(self, steps: int) -> None:
        """`steps` steps, as many as catching_up said or fewer, have run."""
        if self._behind:
            job = next(iter(self._behind))
            self._behind[job] -= steps * self._model.draft_tokens
            if self._behind[job] <= 0:
                del self._behind[job]

    # --- KV that grows

    def steps(self) -> int:
        """Decode steps until the first request ends or, if it is sooner, until memory is full; at least 1."""
        least = min(job.output_tokens - job.decoded for job in self.running)
        if self._lengths.known:
            return least
        return max(1, min(least, self._arena.left // len(self.running)))

    def preempt(self, node: str, order: Callable[[Sequence[Job]], Sequence[Job]]) -> list[Job]:
        """Take requests out that decode at `node`, which this is, the last in the order first, until the others' next
        tokens fit; one always stays. Prompts that are computed count too: they lose their seat."""
        out: list[Job] = []
        if not self._lengths.known and len(self.running) > self._arena.left:
            self._arena.strip()
        while not self._lengths.known and len(self.running) > self._arena.left:
            holders = [*self.running, *(job for job in self.computing if job.decode == node)]
            if not self.running or len(holders) < 2:
                break
            out.append(order(holders)[-1])
            if out[-1] in self.computing:
                self.unseat(out[-1])
            else:
                self.cancel(out[-1])
        return out

    def _grow(self, job: Job) -> None:
        held = self._model.held_tokens(job.context)
        self._arena.grow(job, held)
        if (more := held - self._promises.get(job, held)) > 0:  # the answer is longer than expected
            self._promises[job] += more
            self.promised_tokens += more

    def _leave(self, job: Job) -> None:
        self.running.remove(job)
        self._arena.name_answer(job, job.context - 1)
        self.context -= job.context
        self._behind.pop(job, None)

    def _take(self, job: Job, tokens: int) -> None:
        self._arena.hold(job, tokens)
        if self._arena.left < 0:
            self._arena.strip()

    def _kv_tokens(self, job: Job) -> int:
        """KV memory that the job takes when it starts: at its last token if that is known, else now."""
        return self._model.held_tokens(job.input_tokens + job.output_tokens if self._lengths.known else job.context)
