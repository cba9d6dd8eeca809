"""What acceptor and engine nodes say to each other about requests: the kinds of messages and their bodies.

What an engine node tells the acceptor of a running request (TOKENS) has a form of its own: engine/handoff/updates.py.
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
from engine.sampling.params import SamplingParams
from engine.sampling.token_logprobs import PromptLogprobs
from engine.step.journal import Entry
from engine.step.request import Request
from net.bodies import BodyError
from sched.gossip.intents import Coming

# acceptor -> engine nodes
PROBE = "engine.probe"  # how long would you take for this prompt, and what of it do you have?
INTEND = "engine.intend"  # to the home of a prompt's first block: this node is to compute these blocks
RESERVE = "engine.reserve"  # to the decode node: take blocks for this request
PREFILL = "engine.prefill"  # to the prefill node: compute it, push its KV to these blocks
ABORT = "engine.abort"
ADOPT = "engine.adopt"  # does a request wait there whose acceptor was lost? Then its tokens come here from now on
# prefill node -> decode node
PULL = "engine.handoff.pull"  # read these bytes of mine into the blocks you have reserved; answer when you have them
DECODE = "engine.kv.decode"  # what I wrote to these bytes of yours is encoded; answer when it is decoded
HANDOVER = "engine.handover"  # all KV has landed, this is the first token
# prefill node -> a node whose arena has a part of the prompt (engine/handoff/lending.py)
BORROW = "engine.kv.borrow"  # keep these blocks where they are while I read them
RETURN = "engine.kv.return"  # I have read them: were they kept until now?
# decode node -> prefill node
FENCE = "engine.fence"  # answer when nothing of this request will be pushed any more
# engine nodes -> acceptor
TOKENS = "engine.tokens"
PROMPT_LOGPROBS = "engine.prompt_logprobs"  # ahead of the first token


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request on its way; its token ids travel as data, raw uint32."""

    id: str  # of the attempt
    num_prompt_tokens: int
    sampling: SamplingParams
    service_class: str
    root: bytes
    age_s: float  # since it was accepted: clocks differ, ages do not


@dataclass(frozen=True, slots=True)
class Promise:
    """What the acceptor expects of the prefill node."""

    claim: int  # the work announced to it, in the unit of sched/gossip/load_word.py; 0 = none
    wait_s: float
    ttft_s: float
    redirects_left: int  # how often the prompt may still be sent elsewhere


@dataclass(frozen=True, slots=True)
class Reserve:
    """RESERVE; the answer is a KvTarget."""

    request: WireRequest
    prefill_node: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """PREFILL. `target` is None where the prefill node decodes too."""

    request: WireRequest
    promise: Promise
    target: KvTarget | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Fence:
    id: str


@dataclass(frozen=True, slots=True)
class Handover:
    id: str
    first_token: int


@dataclass(frozen=True, slots=True)
class Pull:
    """PULL; spans are its data (net/transfer/common/spans.py)."""

    id: str
    region: str  # of the prefill node
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Pulled:
    """The answer to PULL."""

    nbytes: int
    seconds: float
    transport: str


@dataclass(frozen=True, slots=True)
class Decode:
    """DECODE; spans are its data, as those of PULL."""

    id: str


@dataclass(frozen=True, slots=True)
class Borrow:
    """BORROW; block keys are its data."""

    loan: int  # the reader's own number
    block_bytes: int


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


@dataclass(frozen=True, slots=True)
class Adopted:
    """The answer to ADOPT; `updates` as in TOKENS: all tokens made so far."""

    attempt_id: str
    updates: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Probe:
    """PROBE; the prompt's block keys are its data."""

    horizon_s: float  # when the prompt would come to its decode node
    to: Sequence[str]  # decode nodes that its KV might go to


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Rates:
    """What a node's rails give, bytes/s."""

    fetch_bytes_per_s: float  # blocks from the pool; 0 = nothing was measured yet
    bytes_per_s: dict[str, float]  # to each decode node that it is known of


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer to PROBE."""

    load: LoadNow
    rates: Rates
    local_tokens: int  # leading tokens of the prompt that the node has


@dataclass(frozen=True, slots=True)
class Intend:
    """INTEND; block keys are its data."""

    node: str  # that is to compute the blocks
    ready_s: float
    instead_of: str = ""  # a node whose claim this one replaces


@dataclass(frozen=True, slots=True)
class Intended:
    """The answer to INTEND: by node, what is being computed already; depths count the keys that were asked about."""

    coming: dict[str, Coming]


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """PROMPT_LOGPROBS; the data is described at `pack_prompt_logprobs`."""

    id: str
    count: int  # prompt tokens, without the first
    top: int  # how many others each has


def prompt_digest(root: bytes, prompt: Sequence[int]) -> str:
    """Names a prompt, so that nobody is given the answer to another one of the same request id."""
    return blake2b(root + array("I", prompt).tobytes(), digest_size=16).hexdigest()


def pack_request(request: Request, age_s: float = 0.0) -> tuple[WireRequest, list[bytes]]:
    """(request without its tokens, data)."""
    wire = WireRequest(
        request.request_id,
        request.num_prompt_tokens,
        request.sampling,
        request.service_class,
        request.root,
        age_s,
    )
    return wire, [array("I", request.token_ids).tobytes()]


def unpack_request(wire: WireRequest, data: memoryview, now: float, handover: bool = False) -> Request:
    """`arrival` is on this node's clock, so that queue orders and preemption count the age since acceptance.
    `handover`: it decodes on another node. Raises BodyError when the data are no tokens of such a prompt."""
    if not data or len(data) % 4 or not 0 < wire.num_prompt_tokens <= len(data) // 4:
        raise BodyError(f"{len(data)} bytes are no tokens of a prompt of {wire.num_prompt_tokens}")
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
        first_output_index=len(tokens) - wire.num_prompt_tokens,
        handover=handover,
    )


def split_keys(data: memoryview) -> list[BlockKey]:
    """Block keys that travelled as data."""
    return [bytes(data[i : i + KEY_BYTES]) for i in range(0, len(data), KEY_BYTES)]


def pack_prompt_logprobs(request: Request) -> tuple[ScoredPrompt, list[bytes]]:
    """(body, data): as they are kept, so that the event loop only copies them."""
    found = request.prompt_logprobs
    return ScoredPrompt(request.request_id, len(found), found.top), found.pack()


def unpack_prompt_logprobs(body: ScoredPrompt, data: memoryview) -> PromptLogprobs:
    """Raises BodyError when the data has another size than the body says."""
    try:
        return PromptLogprobs.unpack(body.count, body.top, data)
    except ValueError as error:
        raise BodyError(str(error)) from None


def _clock_offset() -> tuple[float, float]:
    """(unix - monotonic seconds, how wrong that may be): this thread may lose the processor between two clocks, and
    what one node stamps at different times is compared."""
    before, unix_s, after = time.monotonic(), time.time(), time.monotonic()
    return unix_s - (before + after) / 2, after - before


def timeline_events(entries: Iterable[Entry], node: str) -> list[dict[str, Any]]:
    """A journal's entries as timeline events; the monotonic clock becomes unix seconds."""
    offset = min((_clock_offset() for _ in range(3)), key=lambda found: found[1])[0]
    return [{"t": t + offset, "node": node, "event": event, "detail": detail} for t, event, detail in entries]
