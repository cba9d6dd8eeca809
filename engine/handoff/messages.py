"""Messages between acceptors and engine nodes about requests: their kinds and bodies.

Updates on running requests (TOKENS) have a separate format: engine/handoff/updates.py. The bodies of probes are not
frozen, because that takes three times as long to make: an acceptor reads one from each node that it asks.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from cache.block import KEY_BYTES, BlockKey
from engine.core.kv_ready import KvTarget
from engine.prefill_group.messages import Place
from engine.sampling.params import SamplingParams
from engine.sampling.token_logprobs import PromptLogprobs
from engine.step.journal import Entry
from engine.step.part import Part
from engine.step.request import Request
from net.bodies import BodyError
from sched.gossip.intents import Coming

# acceptor -> engine nodes
PROBE = "engine.probe"  # how long would this prompt take, and how much of it is cached there?
INTEND = "engine.intend"  # to the home of a prompt's first block: a node is about to compute these blocks
RESERVE = "engine.reserve"  # to the decode node: reserve blocks for this request
PREFILL = "engine.prefill"  # to the prefill node: compute it, push its KV to these blocks
ABORT = "engine.abort"
ADOPT = "engine.adopt"  # is a request there whose acceptor was lost? Then send its tokens to this acceptor
# prefill node -> decode node
PULL = "engine.handoff.pull"  # read these bytes of mine into the blocks you have reserved; answer when you have them
DECODE = "engine.kv.decode"  # the bytes that I wrote to these spans are encoded; answer when they are decoded
HANDOVER = "engine.handover"  # all KV has landed; carries the first token
# prefill node -> a node whose arena has a part of the prompt (engine/handoff/lending.py)
BORROW = "engine.kv.borrow"  # keep these blocks where they are while I read them
RETURN = "engine.kv.return"  # I have read them: were they kept until now?
# decode node -> prefill node
FENCE = "engine.fence"  # answer when nothing of this request will be pushed any more
# decode node -> another decode node, to which a running request moves (engine/migration/)
MOVE_IN = "engine.move.in"  # reserve blocks for this running request
MOVE_GROW = "engine.move.grow"  # reserve more of them
MOVE_COMMIT = "engine.move.commit"  # all KV has landed: go on with these tokens
# the destination of a move -> its source
MOVE_FENCE = "engine.move.fence"  # as FENCE; the request itself goes on
# decode node -> acceptor
MOVING = "engine.moving"  # you have all my tokens; the next ones come from this node
# engine nodes -> acceptor
TOKENS = "engine.tokens"
PROMPT_LOGPROBS = "engine.prompt_logprobs"  # sent before the first token


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request on the wire; its token ids travel as the message's data, raw uint32."""

    id: str  # the attempt's id
    num_prompt_tokens: int
    sampling: SamplingParams
    service_class: str
    root: bytes
    age_s: float  # time since acceptance: an age needs no common clock
    fetches: bool = True  # as in Request
    weights: bytes = b""  # as in Request
    site_bound: bool = False  # as in Request


@dataclass(frozen=True, slots=True)
class Promise:
    """The acceptor's expectations of the prefill node."""

    claim: int  # announced work in the unit of sched/gossip/load_word.py; 0 = none
    wait_s: float
    ttft_s: float
    redirects_left: int  # how many more times the prompt may be redirected


@dataclass(frozen=True, slots=True)
class Reserve:
    """RESERVE; the answer is a KvTarget."""

    request: WireRequest
    prefill_nodes: Sequence[str]  # one, or a group (engine/prefill_group/): the last one hands over


@dataclass(frozen=True, slots=True)
class Prefill:
    """PREFILL. `target` is None if the prefill node also decodes; `place`: if several nodes compute the prompt;
    `beyond`: the request's KV exceeds its arena (engine/beyond/)."""

    request: WireRequest
    promise: Promise
    target: KvTarget | None = None
    place: Place | None = None
    beyond: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Fence:
    id: str


@dataclass(frozen=True, slots=True)
class MoveIn:
    """MOVE_IN; the answer is a KvTarget."""

    request: WireRequest
    acceptor: str
    blocks: int


@dataclass(frozen=True, slots=True)
class MoveGrow:
    """MOVE_GROW; the answer is a KvTarget with all blocks."""

    id: str
    blocks: int  # those it has included


@dataclass(frozen=True, slots=True)
class MoveCommit:
    """MOVE_COMMIT; its data are all known tokens, raw uint32. KV of the last one does not exist yet."""

    id: str
    private: bool = False  # Request.private


@dataclass(frozen=True, slots=True)
class Moving:
    """MOVING."""

    id: str
    to: str


@dataclass(frozen=True, slots=True)
class Handover:
    id: str
    first_token: int
    private: bool = False  # Request.private


@dataclass(frozen=True, slots=True)
class Pull:
    """PULL; its data is a list of spans (net/transfer/common/spans.py)."""

    id: str
    region: str  # on the prefill node
    timeout_s: float
    encoded: bool = True  # if the cluster has a --wire-dtype; else the bytes are those of the decode node's blocks


@dataclass(frozen=True, slots=True)
class Pulled:
    """The answer to PULL."""

    nbytes: int
    seconds: float
    transport: str


@dataclass(frozen=True, slots=True)
class Decode:
    """DECODE; its data is a list of spans, as in PULL."""

    id: str


@dataclass(frozen=True, slots=True)
class Borrow:
    """BORROW; block keys are its data."""

    loan: int  # the reader's own number
    block_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Borrowed:
    """The answer to BORROW."""

    region: str
    blocks: Sequence[int]  # of a leading part of the keys: kept until RETURN


@dataclass(frozen=True, slots=True)
class Return:
    """RETURN."""

    loan: int


@dataclass(frozen=True, slots=True)
class Returned:
    """The answer to RETURN."""

    whole: bool  # the blocks were kept until now


@dataclass(frozen=True, slots=True)
class Adopt:
    request_id: str  # as the client knows it
    digest: str  # prompt_digest
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Adopted:
    """The answer to ADOPT; `updates` has the form of TOKENS and holds all tokens so far."""

    attempt_id: str
    updates: Sequence[Any]
    weights: bytes = b""  # that compute it


@dataclass(slots=True)
class Probe:
    """PROBE; its data is the prompt's block keys."""

    horizon_s: float  # time until the prompt would reach its decode node
    to: Sequence[str]  # decode nodes that might receive its KV


@dataclass(slots=True)
class LoadNow:
    """How busy a node is."""

    record: bytes  # packed, see sched/gossip/record.py
    claimed: int
    outstanding: int  # both as in sched/gossip/load_word.py
    step_soon_s: float
    step_alone_s: float
    decode_s: float
    unix_s: float
    boot_id: str


@dataclass(slots=True)
class Rates:
    """Bandwidth of a node's rails, bytes/s."""

    fetch_bytes_per_s: float  # reading blocks from the pool; 0 = not measured yet
    bytes_per_s: dict[str, float]  # to each decode node with a measurement
    converted_bytes_per_s: float = 0.0  # of KV for nodes whose blocks differ; 0 = not measured yet


@dataclass(slots=True)
class Probed:
    """The answer to PROBE."""

    load: LoadNow
    rates: Rates
    local_tokens: int  # leading tokens of the prompt that the node holds


@dataclass(frozen=True, slots=True)
class Intend:
    """INTEND; its data is block keys."""

    node: str  # will compute the blocks
    ready_s: float
    instead_of: str = ""  # the node whose claim this claim replaces


@dataclass(frozen=True, slots=True)
class Intended:
    """The answer to INTEND: what each node already computes; depths are indices into the keys of the question."""

    coming: dict[str, Coming]


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """PROMPT_LOGPROBS; the data is described at `pack_prompt_logprobs`."""

    id: str
    count: int  # prompt tokens, without the first
    top: int  # alternatives per token


def prompt_digest(root: bytes, prompt: Sequence[int]) -> str:
    """Identifies a prompt, so that a client never gets the answer to another prompt with the same request id."""
    return blake2b(root + array("I", prompt).tobytes(), digest_size=16).hexdigest()


def pack_request(request: Request, age_s: float = 0.0) -> tuple[WireRequest, list[bytes]]:
    """Returns (request without its tokens, data)."""
    wire = WireRequest(
        request.request_id,
        request.num_prompt_tokens,
        request.sampling,
        request.service_class,
        request.root,
        age_s,
        request.fetches,
        request.weights,
        request.site_bound,
    )
    return wire, [array("I", request.token_ids).tobytes()]


def unpack_request(
    wire: WireRequest,
    data: memoryview,
    now: float,
    target: KvTarget | None = None,
    part: Part | None = None,
    key_tokens: int = 0,
) -> Request:
    """The request, with `arrival` = now - age_s on this node's clock, so that queue orders use the time since
    acceptance. `target`: the node that decodes it, if another one does; `part`: what to compute of it; `key_tokens`: as
    in Request. Raises BodyError if the data has too few or partial tokens."""
    if not data or len(data) % 4 or not 0 < wire.num_prompt_tokens <= len(data) // 4:
        raise BodyError(f"{len(data)} bytes of data do not hold a prompt of {wire.num_prompt_tokens} tokens")
    tokens = array("I")
    tokens.frombytes(data)
    return Request(
        request_id=wire.id,
        token_ids=tokens.tolist(),
        num_prompt_tokens=wire.num_prompt_tokens,
        sampling=wire.sampling,
        arrival=now - wire.age_s,
        root=wire.root,
        service_class=wire.service_class,
        fetches=wire.fetches,
        weights=wire.weights,
        site_bound=wire.site_bound,
        first_output_index=len(tokens) - wire.num_prompt_tokens,
        handover=target is not None,
        holds_elsewhere=target is not None and target.prefills,
        part=part,
        key_tokens=key_tokens,
    )


def split_keys(data: memoryview) -> list[BlockKey]:
    """The block keys in a message's data."""
    return [bytes(data[i : i + KEY_BYTES]) for i in range(0, len(data), KEY_BYTES)]


def pack_prompt_logprobs(request: Request) -> tuple[ScoredPrompt, list[bytes]]:
    """Returns (body, data). The data keeps the format in memory, so that the event loop only copies it."""
    found = request.prompt_logprobs
    return ScoredPrompt(request.request_id, len(found), found.top), found.pack()


def unpack_prompt_logprobs(body: ScoredPrompt, data: memoryview) -> PromptLogprobs:
    """Raises BodyError if the size of the data does not match the body."""
    try:
        return PromptLogprobs.unpack(body.count, body.top, data)
    except ValueError as error:
        raise BodyError(str(error)) from None


def _clock_offset() -> tuple[float, float]:
    """(unix minus monotonic seconds, maximum error). The error is large if the thread is preempted between the two
    clock reads; it matters because timestamps of one node are compared with each other."""
    before, unix_s, after = time.monotonic(), time.time(), time.monotonic()
    return unix_s - (before + after) / 2, after - before


def timeline_events(entries: Iterable[Entry], node: str) -> list[dict[str, Any]]:
    """Converts a journal's entries to timeline events with unix timestamps in seconds."""
    offset = min((_clock_offset() for _ in range(3)), key=lambda found: found[1])[0]
    return [{"t": t + offset, "node": node, "event": event, "detail": detail} for t, event, detail in entries]
