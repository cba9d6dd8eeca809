"""Converts a valid body to requests for the frontend: token ids, sampling fields, one entry per choice."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from net.http.common.errors import bad_request, naming
from net.http.common.frontend import Frontend
from net.http.openai.prompts import (
    check_ids,
    check_length,
    check_model,
    check_text,
    render_messages,
    too_long,
    truncated,
    unhurried,
)
from net.http.openai.schema import ChatBody, CompletionBody, Generation
from net.http.openai.tools import schema_of_call

DEFAULT_COMPLETION_TOKENS = 16
MAX_TOOL_CALLS = 128
MAX_CHOICE_ENTRIES = 65_536
"""Entries of one field times choices of one request. Each choice is a separate request with all entries; 4,096 entries
of logit_bias take 4 ms of the event loop."""


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    echo: str  # text to send before the generated text; "": none


@dataclass(frozen=True, slots=True)
class Plan:
    """One HTTP request: choice i continues prompts[i // n] with choices[i]."""

    prompts: list[Prompt]
    n: int
    choices: list[dict[str, Any]]  # sampling fields
    service_class: str
    cache_salt: str
    best_of: int = 1  # draws per prompt; if more than n, the answer has the best n (net/http/openai/best_of.py)
    tool_calls: int = 0  # the most calls that are parsed from each answer
    session: str = ""  # the conversation or agent; "": none
    resume_from: int | None = None  # output tokens that the client received from a lost node
    prompt_only: bool = False  # the answer omits generated tokens
    echo_logprobs: bool = False  # the prompt's log probabilities precede the output's
    prompt_logprobs: int | None = None  # alternatives per prompt token in vLLM's field; None: not included

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice // self.n]


async def plan_completion(frontend: Frontend, body: CompletionBody, size: int) -> Plan:
    """Tokenise and check. `size`: bytes of the body. Raises ApiError 400 or 404."""
    check_model(frontend, body.model)
    prompts = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            check_text(frontend, len(prompt), "prompt")
            text, ids = prompt, await unhurried(size, partial(frontend.encode, prompt, body.add_special_tokens))
        else:
            if body.truncate_prompt_tokens is None:
                check_length(frontend, prompt, "prompt")  # before the check of every id
            check_ids(frontend, prompt, "prompt")
            text, ids = await unhurried(size, partial(frontend.decode, prompt)) if body.echo else "", prompt
        kept = truncated(frontend, body, ids, body.max_tokens)
        if body.echo and len(kept) < len(ids):
            text = await unhurried(size, partial(frontend.decode, kept))
        prompts.append(Prompt(kept, text if body.echo else ""))
    prompt_only = body.max_tokens == 0
    limit = 1 if prompt_only else body.max_tokens
    plan = await _plan(frontend, body, prompts, "prompt", limit, DEFAULT_COMPLETION_TOKENS, body.logprobs, size)
    if body.echo and body.logprobs is not None:
        plan = replace(_scored(plan, body.logprobs, 1), echo_logprobs=True)
    return replace(plan, prompt_only=prompt_only)


async def plan_chat(frontend: Frontend, body: ChatBody, size: int) -> Plan:
    """Render, tokenise and check. `size`: bytes of the body. Raises ApiError 400 or 404."""
    check_model(frontend, body.model)
    tools = body.offered
    arguments = body.template_arguments
    ids = await render_messages(frontend, body.messages, body.add_generation_prompt, arguments, tools, size)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    ids = truncated(frontend, body, ids, limit)
    logprobs = body.top_logprobs if body.logprobs else None
    plan = await _plan(frontend, body, [Prompt(ids, "")], "messages", limit, frontend.max_model_len, logprobs, size)
    if tools:
        plan = replace(plan, tool_calls=MAX_TOOL_CALLS if body.parallel_tool_calls else 1)
    return plan


async def _plan(
    frontend: Frontend,
    body: Generation,
    prompts: list[Prompt],
    param: str,
    max_tokens: int | None,
    default_tokens: int,
    logprobs: int | None,
    size: int,
) -> Plan:
    check_ids(frontend, body.stop_token_ids, "stop_token_ids")
    bias = {int(key): value for key, value in body.logit_bias.items()}
    check_ids(frontend, bias, "logit_bias")
    allowed = body.allowed_token_ids or ()
    check_ids(frontend, allowed, "allowed_token_ids")
    bad_words = await unhurried(size, partial(_tokens_of, frontend, body.bad_words))
    entries = {
        "logit_bias": len(bias),
        "stop_token_ids": len(body.stop_token_ids),
        "allowed_token_ids": len(allowed),
        "bad_words": sum(map(len, bad_words)),
    }
    for field, count in entries.items():
        _check_repeated(field, count, body.draws * len(prompts))
    grammar = await _grammar(frontend, body, size)
    left = _output_room(frontend, body, prompts, max_tokens, logprobs)
    choices = []
    for prompt in prompts:
        room = check_length(frontend, prompt.token_ids, param)
        if max_tokens is not None and max_tokens > room:
            used = len(prompt.token_ids)
            raise too_long(frontend, f"{used + max_tokens} ({used} in the {param}, {max_tokens} to generate)", param)
        limit = min(default_tokens, room, left) if max_tokens is None else max_tokens
        choices += [_sampling(body, limit, logprobs, grammar, bias, offset, bad_words) for offset in range(body.n)]
    session = body.session_id or ""
    plan = Plan(prompts, body.n, choices, body.wanted_class, body.cache_salt, body.draws, session=session)
    if body.prompt_logprobs is None:
        return plan
    return replace(_scored(plan, body.prompt_logprobs, body.n), prompt_logprobs=body.prompt_logprobs)


def _check_repeated(field: str, count: int, choices: int) -> None:
    """Raises 400 if `count` entries of the field, repeated for each of `choices`, exceed MAX_CHOICE_ENTRIES."""
    if count * choices > MAX_CHOICE_ENTRIES:
        message = (
            f"{field}: {count} {'tokens' if field == 'bad_words' else 'entries'} for each of {choices} choices exceed "
            f"the limit of {MAX_CHOICE_ENTRIES} per request; ask for fewer choices"
        )
        raise bad_request(message, field)


def _tokens_of(frontend: Frontend, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """The words as tokens, at the beginning of a text and behind a space."""
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    return tuple(dict.fromkeys(ids for text in texts if (ids := tuple(frontend.encode(text, False)))))


def _output_room(
    frontend: Frontend, body: Generation, prompts: list[Prompt], max_tokens: int | None, logprobs: int | None
) -> int:
    """The most tokens per choice that the limit on log probabilities in one answer allows. Raises 400 if the request
    exceeds the limit."""
    most, tokens = frontend.max_answer_logprobs, sum(len(prompt.token_ids) for prompt in prompts)
    of_prompt = 0
    if body.prompt_logprobs is not None:
        of_prompt = tokens * (1 + body.prompt_logprobs) * (body.n if isinstance(body, CompletionBody) else 1)
    elif isinstance(body, CompletionBody) and body.echo and logprobs is not None:
        of_prompt = tokens * (1 + logprobs) * body.n
    kept = 0 if body.draws > body.n and logprobs is None else logprobs  # draws are compared by log probabilities
    each = 0 if kept is None or body.stream else (1 + kept) * len(prompts) * body.draws
    wanted = of_prompt + each * (max_tokens or 1)
    if wanted > most:
        message = (
            f"an answer with {wanted} log probabilities exceeds the {most} that this server sends "
            "(--max-answer-logprobs): ask for fewer tokens, choices or alternatives, or stream"
        )
        raise bad_request(message, "prompt_logprobs" if of_prompt > wanted // 2 else "logprobs")
    return (most - of_prompt) // each if each else frontend.max_model_len


def _scored(plan: Plan, top: int, every: int) -> Plan:
    """The plan in which every `every`-th choice requests log probabilities of the prompt with `top` alternatives per
    token."""

    def asking(index: int, choice: dict[str, Any]) -> dict[str, Any]:
        if index % every:
            return choice
        return choice | {"prompt_logprobs": max(top, choice.get("prompt_logprobs", 0))}

    return replace(plan, choices=[asking(index, choice) for index, choice in enumerate(plan.choices)])


async def _grammar(frontend: Frontend, body: Generation, size: int) -> str:
    """The grammar of the answer; "": none. Raises ApiError 400."""
    try:
        structure = await unhurried(size, partial(_structure, body))
    except ValueError as error:
        raise naming(str(error)) from None
    if structure is None:
        return ""
    field, kind, source = structure
    try:
        return await asyncio.to_thread(frontend.compile_grammar, kind, source)
    except ValueError as error:
        raise bad_request(f"{field}: {error}", field) from error


def _structure(body: Generation) -> tuple[str, str, str] | None:
    """(field, kind, source) of the answer's structure. response_format is that of a text, and a forced call has no
    text. Raises ValueError if the body requests two."""
    structure = body.structure
    if not isinstance(body, ChatBody) or (tools := body.forced) is None:
        return structure
    if structure is not None and structure[0] != "response_format":
        raise ValueError(f"{structure[0]}: allowed only with tool_choice auto or none")
    return "tool_choice", "call", schema_of_call(tools, body.lenient)


def _sampling(
    body: Generation,
    max_tokens: int,
    logprobs: int | None,
    grammar: str,
    bias: dict[int, float],
    offset: int,
    bad_words: tuple[tuple[int, ...], ...],
) -> dict[str, Any]:
    """Fields of SamplingParams. The choices of one prompt draw from different streams; all share `bias`
    and `bad_words`."""
    return {
        "max_tokens": max_tokens,
        "min_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "seed": shifted(body.seed, offset),
        "stop": tuple(body.stop),
        "stop_token_ids": tuple(body.stop_token_ids),
        "ignore_eos": body.ignore_eos,
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "skip_special_tokens": body.skip_special_tokens,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": bias,
        "allowed_token_ids": tuple(body.allowed_token_ids or ()),
        "bad_words": bad_words,
        "logprobs": logprobs,
        "grammar": grammar,
    }


def shifted(seed: int | None, offset: int) -> int | None:
    """The seed of another draw: the sum modulo 2**64 as a signed 64-bit integer."""
    return None if seed is None else (seed + offset + 2**63) % 2**64 - 2**63
