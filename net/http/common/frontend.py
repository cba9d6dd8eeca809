"""Frontend: the interface of the HTTP layer to its node."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class LogprobItem:
    """Log probabilities (natural, of the raw distribution) at one position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the best ids, best first; the caller cuts a list longer than requested
    rank: int = 0  # 1 + number of likelier ids; 0: unknown


@dataclass(frozen=True, slots=True)
class Output:
    """The progress of one or more steps of a generation. Text, ids and logprobs are deltas; counts are totals."""

    text: str  # new text; may be empty while a character or a possible stop string is incomplete
    token_ids: list[int]  # new token ids
    logprobs: list[LogprobItem] | None  # one per new token id, if requested
    finish_reason: str | None  # stop, length or abort on the last Output, else None
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was found instead of computed
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    prompt_logprobs: Sequence[LogprobItem] | None = (
        None  # of prompt tokens 1, 2, ...: on the first Output, if requested
    )
    num_dropped_experts: int = 0  # (token, expert) pairs without a result, because a rank with experts was lost


@dataclass(eq=False, slots=True)
class Choices:
    """The choices of one request, each with its own call of `generate`: the request is taken or refused as a whole.

    If no choice finds room, the request is refused. As soon as a node has begun one, the others wait for room.
    """

    begun: bool = False
    inside: int = 0  # choices without a first token
    trying: int = 0  # choices that ask for a node, for the first time


class _Retry(Exception):
    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(_Retry):
    """The cluster works but has no room for this request now: HTTP 429."""


class Unavailable(_Retry):
    """The cluster cannot serve this request now (a role is missing, the node is leaving): HTTP 503."""


class Refused(Exception):
    """This node refuses the operation: HTTP 409."""


class Frontend(Protocol):
    """A node as the HTTP layer sees it. All methods run on the event loop's thread, except `compile_grammar`, and
    `encode` and `render_chat` for long input; these run in another thread."""

    model_name: str  # the name that clients use
    model_root: str  # path or id it was loaded from
    max_model_len: int  # prompt + output, tokens
    vocab_size: int
    max_answer_logprobs: int  # log probabilities in one whole answer
    trusts_chat_templates: bool  # serves templates of clients

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids (all < vocab_size) to text; special tokens are kept."""
        ...

    def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Renders messages with the chat template to token ids; kwargs: `add_generation_prompt`, `chat_template` (the
        client's own) and the client's `chat_template_kwargs`. Raises ValueError if the template refuses them."""
        ...

    def compile_grammar(self, kind: str, source: str) -> str:
        """The grammar for sampling["grammar"] of `generate`. kind "json": source is a JSON schema, "regex": an
        expression, "choice": a JSON list of strings, "grammar": Lark or GBNF, "call": a JSON schema whose value is in
        <tool_call> tags. Raises ValueError. May take a second; runs in another thread."""
        ...

    def tokenizer_info(self) -> dict[str, Any]:
        """Entries of tokenizer_config.json: eos_token and the other special tokens (None: the model has none), the chat
        template."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token as text for logprobs; U+FFFD if it is only part of a character."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, also if they are only part of a character."""
        ...

    def check_room(self, arriving: int) -> None:
        """Raises Overloaded if there is no room for one more request after `arriving` others that will call `generate`
        soon, and Unavailable if this node has no model."""
        ...

    def generate(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        *,
        request_id: str,
        service_class: str,
        cache_salt: str,
        again: bool = False,
        session: str = "",
        choices: Choices | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Generate from `prompt`; the last Output has a finish_reason. `again`: the client sent this request before, to
        a node that was lost; the node generates the same tokens again, from the first one. `session`: the conversation
        or agent of which this is a turn, as the client names it; "": none. `choices`: shared by the calls for the
        choices of one request; None: this is the only one.

        `sampling` holds fields of SamplingParams (stop and stop_token_ids as tuples, logit_bias as {int: float}).
        Closing the generator, or cancelling its consumer, aborts the request on every node.
        Raises ValueError (400; the message names the field), Overloaded (429), Unavailable (503), at the first item
        or later.
        """
        ...

    def cluster(self) -> dict[str, Any]:
        """Members, roles and addresses, for a joining node."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything this node knows about itself, JSON-ready."""
        ...

    async def live(self) -> dict[str, Any]:
        """The current state of the cluster, as each node reports it (engine/observe/live.py)."""
        ...

    async def live_history(self, after: int) -> dict[str, Any]:
        """The last minutes of the cluster, in intervals with a number above `after` (engine/observe/live.py)."""
        ...

    async def find_timeline(self, request_id: str) -> dict[str, Any] | None:
        """The timeline of a request that any node of the cluster accepted."""
        ...

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """The timeline of one request across nodes, or None if unknown (never seen, or dropped)."""
        ...

    def drain(self, timeout_s: float | None, grace_s: float, force: bool) -> dict[str, Any]:
        """Make this node leave; returns `draining` immediately. Raises Refused for the last node of a role."""
        ...

    def draining(self) -> dict[str, Any]:
        """The progress of leaving (engine/node/leaving.py)."""
        ...

    async def reset_prefix_cache(self) -> dict[str, dict[str, Any]]:
        """All nodes forget cached KV: {node: {"arena_blocks", "pooled_blocks", "error": None or the reason}}."""
        ...

    async def update_weights(self, prefix: str, version: str, tenant: str, timeout_s: float) -> dict[str, Any]:
        """All nodes that compute read the tensors of `tenant` under `prefix`; then the cluster serves them. Returns
        figures. Raises ValueError (the tensors are not the model's), Refused or Unavailable; then nothing has
        changed."""
        ...

    def weights(self) -> dict[str, Any]:
        """Which weights the cluster serves, as this node knows."""
        ...

    def healthy(self) -> str | None:
        """None if this node can serve, else the reason why not."""
        ...

    def masked_ranks(self) -> Mapping[str, str]:
        """Ranks with experts that this node does without at the moment, and why."""
        ...

    async def metrics(self) -> bytes:
        """Prometheus text."""
        ...
