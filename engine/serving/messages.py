"""What acceptor and engine nodes say to each other about requests, and its form on the wire."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from engine.request import Request
from engine.sampling.params import SamplingParams, TokenLogprobs

# acceptor -> engine nodes
PROBE = "engine.probe"  # how long would you take for this prompt, and what of it do you have?
INTEND = "engine.intend"  # to the home of a prompt's first block: this node is to compute these blocks
RESERVE = "engine.reserve"  # to the decode node: take blocks for this request
PREFILL = "engine.prefill"  # to the prefill node: compute it, push its KV to these blocks
ABORT = "engine.abort"
ADOPT = "engine.adopt"  # does a request wait there whose acceptor was lost? Then its tokens come here from now on
# prefill node -> decode node
PULL = "engine.kv.pull"  # read these bytes of mine into the blocks you have reserved; answer when you have them
DECODE = "engine.kv.decode"  # what I wrote to these bytes of yours is encoded; answer when it is decoded
HANDOVER = "engine.handover"  # all KV has landed, this is the first token
# prefill node -> a node whose arena has a part of the prompt (engine/kv/lending.py)
BORROW = "engine.kv.borrow"  # keep these blocks where they are while I read them
RETURN = "engine.kv.return"  # I have read them: were they kept until now?
# decode node -> prefill node
FENCE = "engine.fence"  # answer when nothing of this request will be pushed any more
# engine nodes -> acceptor
TOKENS = "engine.tokens"
PROMPT_LOGPROBS = "engine.prompt_logprobs"  # ahead of the first token


def prompt_digest(root: bytes, prompt: Sequence[int]) -> str:
    """Names a prompt, so that nobody is given the answer to another one of the same request id."""
    return blake2b(root + array("I", prompt).tobytes(), digest_size=16).hexdigest()


def pack_request(request: Request, age_s: float = 0.0) -> tuple[dict[str, Any], list[bytes]]:
    """(body, data): the token ids travel as raw uint32. `age_s`: since it was accepted; clocks differ, ages do not."""
    body = {
        "id": request.request_id,
        "num_prompt_tokens": request.num_prompt_tokens,
        "sampling": request.sampling.to_wire(),
        "class": request.service_class,
        "root": request.root.hex(),
        "age_s": age_s,
    }
    return body, [array("I", request.token_ids).tobytes()]


def unpack_request(body: dict[str, Any], data: memoryview, now: float) -> Request:
    """`arrival` is on this node's clock, so that queue orders and preemption count the age since acceptance."""
    tokens = array("I")
    tokens.frombytes(data)
    return Request(
        request_id=body["id"],
        token_ids=tokens.tolist(),
        num_prompt_tokens=body["num_prompt_tokens"],
        sampling=SamplingParams.from_wire(body["sampling"]),
        arrival=now - body["age_s"],
        root=bytes.fromhex(body["root"]),
        service_class=body["class"],
        first_output_index=len(tokens) - body["num_prompt_tokens"],
    )


def pack_logprobs(logprobs: TokenLogprobs | None) -> list[Any] | None:
    return None if logprobs is None else [logprobs.logprob, logprobs.top]


def unpack_logprobs(wire: Sequence[Any] | None) -> TokenLogprobs | None:
    return None if wire is None else TokenLogprobs(wire[0], [(int(t), float(p)) for t, p in wire[1]])


def pack_prompt_logprobs(request: Request) -> tuple[dict[str, Any], list[bytes]]:
    """(body, data): for each prompt token but the first, its log probability and those of `top` others as float32,
    then its rank and the ids of these as uint32. As JSON a long prompt's would be megabytes."""
    found = request.prompt_logprobs
    values, ids = array("f"), array("I")
    for one in found:
        values.append(one.logprob)
        values.extend(logprob for _, logprob in one.top)
        ids.append(one.rank)
        ids.extend(token_id for token_id, _ in one.top)
    body = {"id": request.request_id, "count": len(found), "top": len(found[0].top)}
    return body, [values.tobytes(), ids.tobytes()]


def unpack_prompt_logprobs(body: dict[str, Any], data: memoryview) -> list[TokenLogprobs]:
    """Raises ValueError when the data has another size than the body says."""
    shape = body["count"], 1 + body["top"]
    border = shape[0] * shape[1] * 4
    values = np.frombuffer(data[:border], np.float32).reshape(shape).tolist()
    ids = np.frombuffer(data[border:], np.uint32).reshape(shape).tolist()
    return [
        TokenLogprobs(own, list(zip(best, others, strict=True)), rank)
        for (own, *others), (rank, *best) in zip(values, ids, strict=True)
    ]


def _clock_offset() -> tuple[float, float]:
    """(unix - monotonic seconds, how wrong that may be): this thread may lose the processor between two clocks, and
    what one node stamps at different times is compared."""
    before, unix_s, after = time.monotonic(), time.time(), time.monotonic()
    return unix_s - (before + after) / 2, after - before


def pack_events(request: Request, node: str) -> list[dict[str, Any]]:
    """The request's log on this node as timeline events; the monotonic clock becomes unix seconds."""
    offset = min((_clock_offset() for _ in range(3)), key=lambda found: found[1])[0]
    return [{"t": t + offset, "node": node, "event": event, "detail": detail} for t, event, detail in request.log]
