"""Request: the state of one generation on one node.

A request has token ids and two counters. `num_tokens` counts the known tokens (prompt and output); `num_computed`
counts those whose KV exists. Each step spends a token budget to close the gap between the two. Prefill, chunked
prefill, decode, prefix hits and recovery differ only in the size of this gap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from cache.block import BlockKey
from cache.keys import extend_keys, extend_wide, weights_root
from cache.layer_groups import GONE
from engine.sampling.params import SamplingParams
from engine.sampling.token_logprobs import PromptLogprobs
from engine.step.apart import Apart
from engine.step.block_table import BlockTable
from engine.step.cold import Cold
from engine.step.journal import Journal
from engine.step.part import Part
from sched.classes import STANDARD


class RequestState(Enum):
    """The state of a request on this node.

    WAITING ──> LOADING ──> WAITING ──> RUNNING ──> FINISHED
             (prefix fetch)               │  ^
    REMOTE ───────────────────────────────┘  ├── WAITING (preempted: blocks released)
    (KV arrives from another node)           └── MOVING (its last blocks go to another decode node)
    """

    WAITING = "waiting"
    LOADING = "loading"
    REMOTE = "remote"
    RUNNING = "running"
    MOVING = "moving"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One generation on one node. Only the batcher and its parts modify it, except that other code appends to its
    journal, and the runner to `prompt_logprobs`."""

    request_id: str
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    sampling: SamplingParams
    arrival: float  # time of acceptance, seconds on this node's monotonic clock
    root: BlockKey  # of the cluster and the request's salt, whatever the weights
    service_class: str = STANDARD.name
    weights: bytes = b""  # that compute it, from its first token to its last; b"": those with which the cluster began
    fetches: bool = True  # may load its prefix from the pool or another arena; else the node computes it
    site_bound: bool = False  # neither it nor its KV may leave the site of its acceptor (--site-bound-tenants)
    state: RequestState = RequestState.WAITING
    num_computed: int = 0  # tokens whose KV is in `block_ids`
    state_lag: int = 0  # how many of them its states lack: accepted drafts, which the next step computes again
    block_ids: list[int] = field(default_factory=list)  # of group 0 (cache/layer_groups.py)
    others: list[list[int]] = field(default_factory=list)  # of the other groups, each as long; GONE = given back
    keys: list[BlockKey] = field(default_factory=list)  # of the full blocks of token_ids, filled as needed
    key_tokens: int = 0  # of each of `keys`, if a block of this node has the tokens of several; 0: one
    wide_keys: list[BlockKey] = field(default_factory=list)  # then: those of this node's blocks
    num_named: int = 0  # full blocks already named in the prefix cache
    num_cached: int = 0  # prompt tokens not computed here, but found in HBM, a lower tier or the pool
    looked_up: bool = False  # the prefix has been looked up in the lower tiers and the pool
    handover: bool = False  # another node decodes: end here after the first new token
    holds_elsewhere: bool = False  # that node computes prompts too, and holds blocks for this one
    handed_over: bool = False  # the prompt was computed on another node and pushed here
    part: Part | None = None  # what this node computes of a long prompt; None: everything
    cold: Cold | None = None  # its KV exceeds the arena: `block_ids` are a part of its blocks, in no order
    paused: bool = False  # it lost its seat and kept its blocks
    private: bool = False  # its KV was computed with fewer experts: no other request may find it
    num_preemptions: int = 0
    num_served: int = 0  # known tokens charged in the queue order; recomputing them is not charged
    finish_reason: str | None = None
    first_output_index: int = 0  # index of the first token generated here; > 0 when resumed from another node
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)  # of token_ids[1], [2], ... so far
    journal: Journal = field(default_factory=Journal)  # any code on the node may append
    table: BlockTable = field(default_factory=BlockTable, repr=False)

    @property
    def held_blocks(self) -> list[int]:
        """Of all groups."""
        if not self.others:
            return self.block_ids
        return [*self.block_ids, *(block for table in self.others for block in table if block != GONE)]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without KV; 1 while decoding, for the last known token."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_settled(self) -> int:
        """Tokens after which all groups can go on: those computed, without the ones that its states lack."""
        return self.num_computed - self.state_lag

    @property
    def num_ready(self) -> int:
        """Prompt tokens that a step may compute now."""
        if self.cold is not None:
            return min(self.num_uncomputed, self.cold.chunk_tokens) if self.cold.open else 0
        return self.num_uncomputed if self.part is None else self.part.room(self.num_computed)

    @property
    def apart(self) -> Apart | None:
        """If it passes the model by itself, not as a row of the ragged batch."""
        return self.cold if self.part is None else self.part

    @property
    def share(self) -> float:
        """Of the layers, that this node computes."""
        return 1.0 if self.part is None else self.part.share

    @property
    def decodes(self) -> bool:
        """Whether only its last known token lacks KV, and all layers of it are computed here."""
        return self.part is None and self.num_uncomputed == 1

    @property
    def resumes(self) -> bool:
        """Whether the request continues from its blocks instead of looking up a prefix."""
        return self.handed_over or self.paused

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt are requested and not reported yet. A cached prefix has no logits, so
        such a request computes its whole prompt."""
        return self.sampling.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt_tokens

    @property
    def output_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def count_cached(self) -> None:
        """Set `num_cached` at the first start. Blocks that a preempted request finds again are its own work."""
        if not self.num_preemptions and not self.handed_over:
            self.num_cached = min(self.num_computed, self.num_prompt_tokens)

    def stop_reason(self, eos_token_ids: Collection[int], max_model_len: int) -> str | None:
        """The reason why generation ends with the last known token; None if it continues."""
        params, count, last = self.sampling, self.num_output_tokens, self.token_ids[-1]
        if count >= params.min_tokens and (
            last in params.stop_token_ids or (last in eos_token_ids and not params.ignore_eos)
        ):
            return "stop"
        if count >= params.max_tokens:
            return "length"
        if self.handover:  # the decode node has a limit of its own
            return "handover"
        return "length" if self.num_tokens >= max_model_len else None

    @property
    def key_root(self) -> BlockKey:
        """The root of its blocks' keys: KV of other weights is never found."""
        return weights_root(self.root, self.weights)

    def block_keys(self, block_size: int) -> list[BlockKey]:
        """Keys of all full blocks of the known tokens; `block_size` is the same at each call."""
        if self.key_tokens in (0, block_size):
            return extend_keys(self.key_root, self.keys, self.token_ids, block_size)
        keys = extend_keys(self.key_root, self.keys, self.token_ids, self.key_tokens)
        return extend_wide(self.wide_keys, keys, block_size // self.key_tokens)

    def block_table(self) -> np.ndarray:
        """block_ids as int32; the returned view is valid until the next call."""
        return self.table.of(self.block_ids)

    def move(self, now: float, state: RequestState, **detail: Any) -> None:
        """Change the state and record it in the journal."""
        self.state = state
        self.journal.note(now, state.value, detail)
