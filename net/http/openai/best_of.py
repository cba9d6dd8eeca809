"""best_of: draws more choices than the answer has, and keeps those with the highest mean log probability."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from net.http.common.frontend import Frontend, Output
from net.http.openai.plan import Plan, shifted
from net.http.openai.streams import Item, joined, run


def generated(frontend: Frontend, plan: Plan, request_id: str) -> AsyncGenerator[Item, None]:
    """The outputs of the plan's choices (net/http/openai/streams.py). With `best_of` above `n` each choice has one
    output, after the end of all draws."""
    return run(frontend, plan, request_id) if plan.best_of <= plan.n else _best(frontend, plan, request_id)


async def _best(frontend: Frontend, plan: Plan, request_id: str) -> AsyncGenerator[Item, None]:
    outputs: list[list[Output]] = [[] for _ in range(len(plan.prompts) * plan.best_of)]
    async with aclosing(run(frontend, _draws(plan), request_id)) as items:
        async for draw, output in items:
            outputs[draw].append(output)
    for prompt in range(len(plan.prompts)):
        draws = [joined(of_draw) for of_draw in outputs[prompt * plan.best_of : (prompt + 1) * plan.best_of]]
        ranked = sorted(draws, key=mean_logprob, reverse=True)[: plan.n]  # stable: of equal draws the first
        for place, output in enumerate(ranked):
            choice = prompt * plan.n + place
            yield choice, _shown(output, draws[0], plan.choices[choice]["logprobs"] is not None)


def _draws(plan: Plan) -> Plan:
    """The plan of all draws. Each has log probabilities; only the first draw of a prompt has those of the prompt."""
    draws = []
    for prompt in range(len(plan.prompts)):
        first = plan.choices[prompt * plan.n]
        first = first | {"logprobs": first["logprobs"] or 0}
        others = {name: value for name, value in first.items() if name != "prompt_logprobs"}
        seeds = [shifted(first["seed"], offset) for offset in range(1, plan.best_of)]
        draws += [first, *(others | {"seed": seed} for seed in seeds)]
    return replace(plan, n=plan.best_of, choices=draws)


def mean_logprob(output: Output) -> float:
    """Mean natural log probability of the tokens; -inf without tokens."""
    items = output.logprobs
    return sum(item.logprob for item in items) / len(items) if items else -math.inf


def _shown(output: Output, first: Output, logprobs: bool) -> Output:
    """The output as a choice of the answer. `first`: the prompt's first draw, which knows of the prompt; `logprobs`:
    the client wants those of the output."""
    return replace(
        output,
        logprobs=output.logprobs if logprobs else None,
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
    )
