"""Structured output: which tokens may follow, so that the answer is JSON of a schema, matches a regex, or is a choice.

llguidance compiles grammars and computes masks; this module caches them. A mask depends only on the grammar and the
output so far. A request that continues on another node, is preempted, or has drafts judged after its last token
(speculation; rows after a wrong draft are dropped) therefore needs no state from another node or step. The state of a
step is cached for the next one, which then consumes one token (10 us to copy, 0.1 ms for a mask of 49,152 tokens);
without the cached state, the output is consumed again at 1 us per token.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from engine.text.tokenizer import Tokenizer

log = logging.getLogger("mooncake.engine")

MAX_SOURCE_CHARS = 256 << 10
MAX_GRAMMAR_CHARS = 32 << 10
"""Of Lark or GBNF; the latter is converted by Python code."""

KEPT_GRAMMARS = 128
KEPT_STATES = 512
"""Far more than the rows of a step, so that states of requests between two steps are not lost."""

WHITESPACE = r"\n? {0,16}"
"""Between the parts of JSON, indented or not. The limit is for small models, which otherwise repeat spaces forever."""

SPELT = '%llguidance {"no_forcing": true}\n'
"""The begin of a grammar whose masks have all tokens that may follow, also where only one text may."""

K = TypeVar("K")
V = TypeVar("V")


class _Kept(OrderedDict[K, V]):
    """The `most` most recently used entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def find(self, key: K) -> V | None:
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def keep(self, key: K, value: V) -> None:
        self[key] = value
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)


class Grammars:
    """Compiled grammars of one tokenizer, and the masks of outputs. Safe to call from several threads.

    The acceptor calls `compile` to check a request; the sampler calls `allowed`, on any node."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None  # see `prepare`
        self._compiled: _Kept[str, LLMatcher] = _Kept(KEPT_GRAMMARS)
        self._states: _Kept[tuple[str, tuple[int, ...]], LLMatcher] = _Kept(KEPT_STATES)

    def compile(self, kind: str, source: str) -> str:
        """The grammar's text for SamplingParams.grammar.

        kind: "json" with a JSON schema, "regex" in Rust's syntax (no look-around; it matches the whole answer),
        "choice" with a JSON list of strings, "grammar" in Lark's or GBNF's syntax, or "call" with the JSON schema of
        the value in <tool_call> tags. Raises ValueError with the reason why it cannot be compiled."""
        from llguidance import LLMatcher

        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(f"a schema may have at most {MAX_SOURCE_CHARS} characters, this one has {len(source)}")
        if not self._tokenizer.eos_token_ids:
            raise ValueError("this model has no end-of-sequence token, without which structured output never ends")
        makers: dict[str, Callable[[str], str]] = {
            "json": lambda s: LLMatcher.grammar_from_json_schema(s, overrides={"whitespace_pattern": WHITESPACE}),
            "regex": LLMatcher.grammar_from_regex,
            "call": _tagged,
            "grammar": _lark,
            "choice": lambda s: LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(s)))),
        }
        try:
            grammar = makers[kind](source)
        except ValueError as error:  # not JSON
            raise ValueError(f"cannot compile the {kind}: {error}") from None
        if reason := self._start(grammar).get_error():
            raise ValueError(f"cannot compile the {kind}: {reason.splitlines()[0][:300]}")
        return grammar

    def allowed(self, grammar: str, output: Sequence[int]) -> np.ndarray:
        """[vocab] bool: the tokens that may follow this output. If the grammar is complete, or has become too complex,
        only tokens that end the output."""
        state = self._state(grammar, tuple(output))
        if state.is_error():
            log.warning("an answer ended before its grammar was complete: %s", state.get_error().partition("\n")[0])
            mask = np.zeros(self._words().vocab_size, dtype=bool)
            mask[list(self._tokenizer.eos_token_ids)] = True
            return mask
        bits = np.frombuffer(state.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self._words().vocab_size].astype(bool)
        if np.count_nonzero(mask) == 1 and self._misread(state, int(mask.argmax())) and not grammar.startswith(SPELT):
            return self.allowed(_spelt(grammar), output)
        return mask

    def _misread(self, state: LLMatcher, token: int) -> bool:
        """Whether the only token of a mask is a control token that the grammar does not allow. Where only one text may
        follow, llguidance tokenises it, and reads "<|im_end|>" in an answer as the end of the answer."""
        if token in self._tokenizer.eos_token_ids:
            return not state.is_accepting()
        return token in self._tokenizer.bytes_of.special_ids and not state.validate_tokens([token])

    def _state(self, grammar: str, output: tuple[int, ...]) -> LLMatcher:
        with self._lock:
            known = self._states.find((grammar, output))
            before = self._states.find((grammar, output[:-1])) if known is None and output else None
        if known is not None:
            return known
        state = (before or self._start(grammar)).deep_copy()
        state.consume_tokens(list(output[-1:] if before is not None else output))
        with self._lock:
            self._states.keep((grammar, output), state)
        return state

    def _start(self, grammar: str) -> LLMatcher:
        """The state before the first token."""
        from llguidance import LLMatcher

        with self._lock:
            known = self._compiled.find(grammar)
        if known is None:
            known = LLMatcher(self._words(), grammar, log_level=0)
            with self._lock:
                self._compiled.keep(grammar, known)
        return known

    def prepare(self) -> None:
        """Build the vocabulary. This holds the interpreter lock for 0.3 s, so the node does it before it serves, not at
        the first request for structured output. A node whose tokenizer gives no vocabulary still starts; `compile` then
        raises the reason."""
        if not self._tokenizer.eos_token_ids:
            return
        try:
            self._words()
        except ValueError as error:
            log.warning("this node refuses structured output: %s", error)

    def _words(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = vocabulary(self._tokenizer.to_json(), self._tokenizer.eos_token_ids)
            return self._vocabulary


_shared: _Kept[tuple[bytes, tuple[int, ...]], LLTokenizer] = _Kept(2)
_sharing = threading.Lock()


def vocabulary(tokenizer_json: str, ends: tuple[int, ...]) -> LLTokenizer:
    """llguidance's form of a tokenizer.json with these end-of-sequence tokens. It is immutable, so all users of one
    tokenizer in a process share it, and so do processes that are forked later (tests/fork_server.py). Raises ValueError
    if it has no form for this tokenizer."""
    from llguidance import LLTokenizer

    key = blake2b(tokenizer_json.encode(), digest_size=16).digest(), ends
    with _sharing:
        if (known := _shared.find(key)) is None:
            known = LLTokenizer(tokenizer_json, eos_token=list(ends))
            _shared.keep(key, known)
        return known


def _spelt(grammar: str) -> str:
    """The same grammar, see SPELT."""
    if not grammar.startswith("{"):
        return SPELT + grammar
    (only,) = json.loads(grammar)["grammars"]
    return SPELT + (only["lark_grammar"] or f"start: %json {json.dumps(only['json_schema'])}")


def _lark(text: str) -> str:
    """The grammar in Lark's syntax as llguidance reads it, or in GBNF (`root ::= ...`). Raises ValueError."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"a grammar may have at most {MAX_GRAMMAR_CHARS} characters, this one has {len(text)}")
    try:
        lark = any_to_lark(text)
    except Exception as error:  # its reader of GBNF fails in many ways on other text
        raise ValueError(f"it is neither Lark nor GBNF: {str(error)[:200]}") from None
    return str(LLMatcher.grammar_from_lark(lark))


def _tagged(schema: str) -> str:
    """The grammar of one call in the form of Hermes models, which net/http/openai/tools.py parses."""
    body = json.dumps(json.loads(schema) | {"x-guidance": {"whitespace_pattern": WHITESPACE}})
    return f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {body}'
