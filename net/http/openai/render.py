"""Renders outputs as OpenAI JSON: choices of completions and chats, whole and in chunks, logprobs and usage.

It passes plain dicts to orjson, because it runs once per token and request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from net.http.common.errors import ApiError
from net.http.common.frontend import Frontend, LogprobItem, Output
from net.http.common.pieces import VALUE_CHARS, Rows
from net.http.openai.logprobs import CompletionLogprobs, finite, prompt_logprobs
from net.http.openai.plan import Plan
from net.http.openai.schema import StreamOptions
from net.http.openai.sse import Event
from net.http.openai.streams import Received, joined
from net.http.openai.tools import ToolText
from net.http.openai.usage import Usage

Json = dict[str, Any]

NO_OPTIONS = StreamOptions()


class Renderer:
    """One request's outputs as JSON. Subclasses render a choice whole and in chunks."""

    kind: str
    chunk_kind: str
    id_prefix: str

    ending = b"data: [DONE]\n\n"
    last_size = 0

    def __init__(
        self,
        frontend: Frontend,
        plan: Plan,
        request_id: str,
        created: int,
        token_ids: bool,
        options: StreamOptions = NO_OPTIONS,
    ) -> None:
        """created: Unix time in seconds; token_ids: add token ids to every choice and chunk."""
        self._options = options
        self.frontend = frontend
        self.plan = plan
        self.token_ids = token_ids
        self.usage = Usage(plan.n)
        self.size = 0  # approximate number of values in `whole`
        self._head = {"id": f"{self.id_prefix}-{request_id}", "created": created, "model": frontend.model_name}
        self._outputs: list[list[Output]] = [[] for _ in plan.choices]
        self._started: set[int] = set()
        self._resumed: set[int] = set()  # choices of which the client has a part
        self._shared: dict[tuple[str, int], Rows] = {}

    def size_of(self, choice: int, output: Output) -> int:
        """Approximate number of values in the `chunk` of `output`."""
        asked = self.plan.choices[choice]
        size = len(output.token_ids) + (1 + (asked["logprobs"] or 0)) * len(output.logprobs or ())
        if output.prompt_logprobs is not None:
            size += (1 + (asked.get("prompt_logprobs") or 0)) * len(output.prompt_logprobs)
        return size

    def collect(self, choice: int, output: Output) -> None:
        """Keep an output for `whole`."""
        if isinstance(output, Received):
            self._receive(choice, output)
            return
        if not self._outputs[choice]:
            prompt = self.plan.prompt_of(choice)
            self.size += len(prompt.echo) // VALUE_CHARS + (len(prompt.token_ids) if self.token_ids else 0)
        self.size += self.size_of(choice, output)
        self.usage.add(choice, output)
        self._outputs[choice].append(output)

    def whole(self) -> Json:
        """The response without streaming, once every choice is finished."""
        choices = [self._whole_choice(choice, joined(outputs)) for choice, outputs in enumerate(self._outputs)]
        return self._head | {"object": self.kind, "choices": choices, "usage": self.usage.json()}

    def events(self, choice: int, output: Output) -> list[Event]:
        """The event of one output of a stream."""
        if isinstance(output, Received):
            self._receive(choice, output)
            return []
        chunk = self.chunk(choice, output)
        if self._options.continuous_usage_stats:
            chunk["usage"] = self.usage.json()
        elif self._options.include_usage:
            chunk["usage"] = None
        return [("", chunk)]

    def _receive(self, choice: int, output: Output) -> None:
        """What follows continues this part, which is neither sent nor counted: an open call, a position in the text."""
        self._chunk_choice(choice, output, True)
        self._resumed.add(choice)

    def last_events(self) -> list[Event]:
        return [("", self.usage_chunk())] if self._options.include_usage else []

    def failure(self, error: ApiError) -> Event:
        return "", error.body()

    def chunk(self, choice: int, output: Output) -> Json:
        """One output of a stream."""
        self.usage.add(choice, output)
        first = choice not in self._started
        self._started.add(choice)
        rendered = self._chunk_choice(choice, output, first)
        if output.finish_reason is not None:
            rendered["stop_reason"] = output.stop_reason
        if self.token_ids:
            rendered["token_ids"] = output.token_ids
        return self._head | {"object": self.chunk_kind, "choices": [rendered]}

    def usage_chunk(self) -> Json:
        """The event after the last choice's end."""
        return self._head | {"object": self.chunk_kind, "choices": [], "usage": self.usage.json()}

    def _whole_choice(self, choice: int, output: Output) -> Json:
        rendered = self._choice(choice, output)
        rendered["stop_reason"] = output.stop_reason
        if self.token_ids:
            rendered["token_ids"] = output.token_ids
            ids, first = self.plan.prompt_of(choice).token_ids, choice - choice % self.plan.n
            rendered["prompt_token_ids"] = self._once(("ids", first), lambda: ids)
        return rendered

    def _prompt_logprobs(self, choice: int) -> Rows | None:
        """vLLM's field for this choice's prompt; None: not requested. The prompt's first choice contains the values."""
        wanted, first = self.plan.prompt_logprobs, choice - choice % self.plan.n
        if wanted is None:
            return None
        items = self._outputs[first][0].prompt_logprobs or ()
        return self._once(("logprobs", first), partial(prompt_logprobs, self.frontend, items, wanted))

    def _once(self, name: tuple[str, int], make: Callable[[], Iterable[Any]]) -> Rows:
        """Rows shared by all choices of a prompt: encoded once, for the first of them."""
        return self._shared.setdefault(name, Rows(make))

    def _choice(self, choice: int, output: Output) -> Json:
        raise NotImplementedError

    def _chunk_choice(self, choice: int, output: Output, first: bool) -> Json:
        raise NotImplementedError


class CompletionRenderer(Renderer):
    """/v1/completions: chunks look like whole choices."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, frontend: Frontend, plan: Plan, *options: Any) -> None:
        super().__init__(frontend, plan, *options)
        self._by_choice = [self._shown(choice) for choice in range(len(plan.choices))]

    def _shown(self, choice: int) -> CompletionLogprobs | None:
        """None: log probabilities are not requested."""
        wanted, prompt = self.plan.choices[choice]["logprobs"], self.plan.prompt_of(choice)
        return None if wanted is None else CompletionLogprobs(self.frontend, wanted, prompt.token_ids, prompt.echo)

    def _choice(self, choice: int, output: Output) -> Json:
        of_prompt = self._prompt_logprobs(choice)
        return self._chunk_choice(choice, output, True) | ({} if of_prompt is None else {"prompt_logprobs": of_prompt})

    def _chunk_choice(self, choice: int, output: Output, first: bool) -> Json:
        begins = first and choice not in self._resumed
        return {
            "index": choice,
            "text": self.plan.prompt_of(choice).echo + output.text if begins else output.text,
            "logprobs": self._logprobs(choice, output),
            "finish_reason": output.finish_reason,
        }

    def _logprobs(self, choice: int, output: Output) -> Json | None:
        logprobs = self._by_choice[choice]
        of_prompt = output.prompt_logprobs if self.plan.echo_logprobs else None
        if logprobs is None or (output.logprobs is None and of_prompt is None):
            return None
        return logprobs.render(of_prompt, output.logprobs or [])


class ChatRenderer(Renderer):
    """/v1/chat/completions: a message, or deltas of one."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, frontend: Frontend, plan: Plan, *options: Any) -> None:
        super().__init__(frontend, plan, *options)
        self._tools = [ToolText(plan.tool_calls) for _ in plan.choices] if plan.tool_calls else None

    def whole(self) -> Json:
        of_prompt = self._prompt_logprobs(0)
        return super().whole() | ({} if of_prompt is None else {"prompt_logprobs": of_prompt})

    def _choice(self, choice: int, output: Output) -> Json:
        text, calls, output = self._calls(choice, output)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            # Newlines around calls are not content; calls in whole answers have no index.
            whole = [{name: value for name, value in call.items() if name != "index"} for call in calls]
            message |= {"content": text.strip() or None, "tool_calls": whole}
        return self._around(choice, output, "message", message)

    def _chunk_choice(self, choice: int, output: Output, first: bool) -> Json:
        # The role is sent with the first token: clients that measure the gaps between events would count a separate
        # event as a token.
        text, calls, output = self._calls(choice, output)
        delta: Json = {"role": "assistant", "content": text} if first else {"content": text}
        if calls:
            delta |= {"content": text or None, "tool_calls": calls}
        return self._around(choice, output, "delta", delta)

    def _calls(self, choice: int, output: Output) -> tuple[str, list[Json], Output]:
        """(content, calls, the output with the finish_reason for the client)."""
        if self._tools is None:
            return output.text, [], output
        tools = self._tools[choice]
        text, calls = tools.feed(output.text, last=output.finish_reason is not None)
        if tools.calls and output.finish_reason == "stop":
            output = replace(output, finish_reason="tool_calls")
        return text, calls, output

    def _around(self, choice: int, output: Output, name: str, message: Json) -> Json:
        logprobs = self._logprobs(choice, output.logprobs)
        return {"index": choice, name: message, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _logprobs(self, choice: int, items: list[LogprobItem] | None) -> Json | None:
        wanted = self.plan.choices[choice]["logprobs"]
        if wanted is None or items is None:
            return None
        content = []
        for item in items:
            top = [self._token(token_id, logprob) for token_id, logprob in item.top[:wanted]]
            content.append(self._token(item.token_id, item.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        text, raw = self.frontend.token_text(token_id), self.frontend.token_bytes(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}
