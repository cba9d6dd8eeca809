"""An answer as a list of blocks, texts and calls of tools: what /v1/responses and /v1/messages have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from net.http.common.errors import ApiError
from net.http.common.frontend import Frontend, Output
from net.http.openai.plan import Plan
from net.http.openai.sse import Event
from net.http.openai.tools import ToolText
from net.http.openai.usage import Usage

Json = dict[str, Any]


@dataclass(slots=True)
class Block:
    """A text, or a call. `name`: of the called function; empty for a text."""

    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)  # of the text, or of the arguments as JSON

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockAnswer(ABC):
    """The answer of one choice. Subclasses say what a client reads of each step."""

    ending = b""
    last_size = 0

    def __init__(self, frontend: Frontend, plan: Plan, request_id: str) -> None:
        self.model = frontend.model_name
        self.request_id = request_id
        self.blocks: list[Block] = []
        self.usage = Usage(plan.n)
        self.reason = ""  # finish_reason of the last output: stop, length, abort, tool_calls
        self.stopped_by: int | str | None = None
        self.size = 0
        self._tools = ToolText(plan.tool_calls) if plan.tool_calls else None
        self._begun = self._writing = False  # _writing: the last block is a text that may go on

    def size_of(self, choice: int, output: Output) -> int:
        return len(output.token_ids)

    def collect(self, choice: int, output: Output) -> None:
        self.size += self.size_of(choice, output)
        self.events(choice, output)

    def events(self, choice: int, output: Output) -> list[Event]:
        self.usage.add(choice, output)
        found = [] if self._begun else self.begin()
        self._begun = True
        text, calls, last = output.text, list[Json](), output.finish_reason is not None
        if self._tools is not None:
            text, calls = self._tools.feed(text, last)
            text = text if self._writing else text.lstrip("\n")  # the line ends around calls are no text
        if text:
            found += self._write(text)
        for call in calls:
            called = call["function"]
            found += [*self._close(), *self._add(Block(called["name"], call["id"], [called["arguments"]]))]
            found += self.ended(self.blocks[-1])
        if output.finish_reason is not None:
            self.reason = "tool_calls" if self._called and output.finish_reason == "stop" else output.finish_reason
            self.stopped_by = output.stop_reason
            found += [*([] if self.blocks else self._write("")), *self._close()]
        return found

    @property
    def _called(self) -> bool:
        return self._tools is not None and self._tools.calls > 0

    def _write(self, text: str) -> list[Event]:
        begun = [] if self._writing else self._add(Block())
        self._writing = True
        self.blocks[-1].pieces.append(text)
        return begun + (self.text(text) if text else [])

    def _add(self, block: Block) -> list[Event]:
        self.blocks.append(block)
        return self.added(block)

    def _close(self) -> list[Event]:
        closed = self.ended(self.blocks[-1]) if self._writing else []
        self._writing = False
        return closed

    @property
    def at(self) -> int:
        """Index of the last block."""
        return len(self.blocks) - 1

    @abstractmethod
    def begin(self) -> list[Event]:
        """Before the first block."""

    @abstractmethod
    def added(self, block: Block) -> list[Event]:
        """The last block begins. A call is complete."""

    @abstractmethod
    def text(self, text: str) -> list[Event]:
        """More of the last block."""

    @abstractmethod
    def ended(self, block: Block) -> list[Event]:
        """The last block is complete."""

    @abstractmethod
    def last_events(self) -> list[Event]: ...

    @abstractmethod
    def failure(self, error: ApiError) -> Event: ...

    @abstractmethod
    def whole(self) -> Json: ...
