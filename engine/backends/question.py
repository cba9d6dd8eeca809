"""The question to a worker: POST /v1/completions in vLLM's form, with the prompt as token ids. Pure.

Stop strings are looked for here, so they are not sent. After a worker was lost, the question continues the answer:
prompt + tokens so far, and fewer tokens to generate.
"""

from __future__ import annotations

import json
from typing import Any

from cache.block import BlockKey
from engine.sampling.params import SamplingParams

FIELDS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "ignore_eos": False,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logprobs": None,
}
"""Sampling fields with the same name and meaning there, and the value that means nothing. temperature is always sent:
workers may have another default."""

STRUCTURES = ("json", "regex", "choice", "grammar")


class Forwarded:
    """Structured output is not compiled here: the worker gets it as the client gave it."""

    def compile(self, kind: str, source: str) -> str:
        """For SamplingParams.grammar: vLLM's structured_outputs as JSON. Raises ValueError."""
        if kind not in STRUCTURES:
            raise ValueError("a forced call is not available from the workers of --backend; use tool_choice auto")
        return json.dumps({kind: json.loads(source) if kind in ("json", "choice") else source})


def question(
    model: str, token_ids: list[int], num_prompt_tokens: int, sampling: SamplingParams, salt: BlockKey | None
) -> dict[str, Any]:
    """The body. `salt`: separates the cached prefixes of these requests from others. Raises ValueError for what a
    worker cannot do."""
    if sampling.bad_words:
        raise ValueError("bad_words is not available from the workers of --backend")
    if sampling.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs and echo with logprobs are not available from the workers of --backend")
    made = len(token_ids) - num_prompt_tokens
    body: dict[str, Any] = {
        "model": model,
        "prompt": token_ids,
        "max_tokens": sampling.max_tokens - made,
        "temperature": sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    body |= {name: getattr(sampling, name) for name, usual in FIELDS.items() if getattr(sampling, name) != usual}
    if sampling.min_tokens > made:
        body["min_tokens"] = sampling.min_tokens - made
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if sampling.allowed_token_ids:
        body["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.logprobs is not None:
        body["return_tokens_as_token_ids"] = True
    if sampling.grammar:
        body["structured_outputs"] = json.loads(sampling.grammar)
    if salt is not None:
        body["cache_salt"] = salt.hex()
    return body
