"""One accepted request: its state so far, and its output as text."""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, overload

from cache.block import BlockKey
from engine.front.moving import Places
from engine.front.persistence import Persistence
from engine.handoff.updates import Closing, Ended, TimedOut, Token, Update
from engine.observe.timeline import Timeline
from engine.sampling.params import SamplingParams, TokenLogprobs
from engine.sampling.token_logprobs import PromptLogprobs
from engine.step.request import Request
from engine.text.output import StopStrings
from engine.text.tokenizer import IncrementalDecoder, Tokenizer
from net.http.common.frontend import LogprobItem, Output

HASHED_BYTES = 2047
"""Bytes hashed in one call: for longer ones hashlib gives up the interpreter lock, and the event loop gets it back up
to a millisecond later, after 5 us of hashing."""


@dataclass(eq=False, slots=True)
class Flight:
    """One accepted request and its state so far."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    service_class: str
    root: BlockKey
    timeline: Timeline
    deadline: float  # monotonic seconds
    accepted: float  # monotonic seconds
    persistence: Persistence
    weights: bytes = b""  # that compute it; they may change until the first token
    site_bound: bool = False  # as in Request
    session: int | None = None  # of which this is a turn (engine/front/sessions/)
    first_token: float = 0.0
    last_token: float = 0.0
    attempt: int = 0
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    begun: float = 0.0  # when the current attempt was placed; before last_token if the attempt has made a token
    resumed: bool = False  # its client may have tokens from a lost acceptor
    adopted: str | None = None  # the attempt of another acceptor that this flight continues
    incomplete: bool = False  # the prefix of an attempt arrived incomplete
    redirects: int = 0  # attempts that ended because the prefill node sent the prompt away
    avoid: set[str] = field(default_factory=set)  # prefill nodes that sent the prompt away, or failed beyond memory
    prefills: tuple[str, ...] = ()  # nodes that compute the prompt in the current attempt
    apart: bool = False  # several nodes do the current attempt
    beyond: bool = False  # its KV exceeds the arena of the node of the current attempt
    failed_apart: int = 0  # attempts on several nodes that failed before a token
    runs: bool = False  # an attempt has begun; `items` receives its outputs and its end
    items: asyncio.Queue[Update | TimedOut | Closing | Ended] = field(default_factory=asyncio.Queue)
    early: list[Token] = field(default_factory=list)  # of the decode node, before the first one, of the prefill node
    timer: asyncio.TimerHandle | None = None  # puts TimedOut into `items` at the deadline
    places: Places = field(default_factory=lambda: Places(set(), set()))  # the nodes of this attempt
    asking: tuple[str, asyncio.Task[Any]] | None = None  # (the node that must answer, the waiting task)
    unheard: str = ""  # why the task should stop waiting for that node
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)  # of prompt tokens 1, 2, ...

    @property
    def attempt_id(self) -> str:
        """The request's name on the engine nodes. The nonce is in it because clients use an id again, perhaps while the
        first request runs or after this acceptor was started again, and nodes remember the names of ended requests."""
        if self.adopted is not None:
            return self.adopted
        return f"{self.timeline.nodes['acceptor']}/{self.request_id}#{self.nonce}.{self.attempt}"

    @property
    def watched(self) -> set[str]:
        """Nodes whose loss ends this attempt."""
        return self.places.watched

    @property
    def nodes(self) -> set[str]:
        """Nodes that know this attempt."""
        return self.places.nodes

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def as_request(self) -> Request:
        """What the current attempt asks of an engine."""
        return Request(
            request_id=self.attempt_id,
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            arrival=self.accepted,
            root=self.root,
            service_class=self.service_class,
            weights=self.weights,
            fetches=not self.incomplete and not self.persistence.last,
            site_bound=self.site_bound,
        )


class PromptItems(Sequence[LogprobItem]):
    """Log probability items of the prompt's tokens except the first, built when they are read."""

    def __init__(self, tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> None:
        """Raises RuntimeError if `found` does not have one entry per item."""
        if len(tokens) != len(found):
            raise RuntimeError(f"received {len(found)} log probabilities for {len(tokens)} prompt tokens")
        self._tokens, self._found = tokens, found

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, at: int) -> LogprobItem: ...

    @overload
    def __getitem__(self, at: slice) -> list[LogprobItem]: ...

    def __getitem__(self, at: int | slice) -> LogprobItem | list[LogprobItem]:
        if isinstance(at, slice):
            return [self[place] for place in range(len(self))[at]]
        found = self._found[at]
        return LogprobItem(self._tokens[at], found.logprob, found.top, found.rank)


def drawn_seed(request_id: str, prompt: list[int]) -> int:
    """The seed of a request without one. Every node that computes the request draws the same tokens. An id that the
    client does not choose is random, and so is its seed."""
    content = memoryview(request_id.encode() + b"\0" + array("I", prompt).tobytes())
    digest = blake2b(digest_size=8)
    for begin in range(0, len(content), HASHED_BYTES):
        digest.update(content[begin : begin + HASHED_BYTES])
    return int.from_bytes(digest.digest(), "little") >> 1


class OutputText:
    """Turns the tokens of a flight into Outputs: it detokenises them and cuts at stop strings."""

    def __init__(self, tokenizer: Tokenizer, flight: Flight) -> None:
        self._flight = flight
        self._decoder = IncrementalDecoder(tokenizer, flight.sampling.skip_special_tokens, flight.token_ids)
        self._stops = StopStrings(flight.sampling.stop)

    def push(self, token: int, logprobs: TokenLogprobs | None, finish: str | None) -> Output:
        """The output for one token. The token that ends generation (EOS, stop token) has no text, except a stop token
        of a client that wants it. Stop strings count in the text behind the first `min_tokens` tokens."""
        sampling = self._flight.sampling
        shown = sampling.include_stop_str_in_output and token in sampling.stop_token_ids
        delta = "" if finish == "stop" and not shown else self._decoder.push([token])
        if finish is not None:
            delta += self._decoder.flush()
        early = self._flight.num_output_tokens <= sampling.min_tokens
        stop: int | str | None
        text, stop = (delta, None) if early else self._stops.feed(delta)
        if isinstance(stop, str):
            finish = "stop"
            text += stop if sampling.include_stop_str_in_output else ""
        elif finish is not None:
            text += self._stops.flush()
            stop = token if finish == "stop" and token in sampling.stop_token_ids else None
        item = None if logprobs is None else [LogprobItem(token, logprobs.logprob, logprobs.top)]
        output = self._output(text, [token], item, finish, stop)
        if self._flight.num_output_tokens == 1 and self._flight.sampling.prompt_logprobs is not None:
            tokens = self._flight.token_ids[1 : self._flight.num_prompt_tokens]
            output = replace(output, prompt_logprobs=PromptItems(tokens, self._flight.prompt_logprobs))
        return output

    def end(self, finish: str) -> Output:
        return self._output(self._decoder.flush() + self._stops.flush(), [], None, finish, None)

    def _output(self, text: str, ids: list[int], items: Any, finish: Any, stop: int | str | None) -> Output:
        flight = self._flight
        return Output(
            text=text,
            token_ids=ids,
            logprobs=items,
            finish_reason=finish,
            num_prompt_tokens=flight.num_prompt_tokens,
            num_cached_tokens=flight.timeline.cached_tokens,
            num_dropped_experts=flight.timeline.dropped_experts,
            stop_reason=stop,
        )
