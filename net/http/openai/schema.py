"""Request bodies: the served fields and their types. net/http/openai/fields.py handles all other fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, field_validator, model_validator

from net.http.openai.fields import WHOLE, AtLeast0, AtLeast1, Known, TokenIds, UpTo20, Whole, served_fields, whole_ids
from net.http.openai.messages import Conversation
from net.http.openai.structured import Structured
from net.http.openai.tools import MAX_TOOLS, Tool

SERVICE_CLASSES = ("interactive", "standard", "batch")

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_BIASES = 4096
MAX_ALLOWED_IDS = 4096
MAX_BAD_WORDS = 256
MAX_TEMPLATE_CHARS = 65_536
MAX_CHOICES = 1024
"""Prompts times n, or times best_of, in one request."""
RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tools", "self", "chat_template"})


def _no_reserved(arguments: dict[str, Any]) -> dict[str, Any]:
    for name in sorted(RESERVED & set(arguments)):
        raise ValueError(f"{name} cannot be passed to the template: it has its own field, or is reserved")
    return arguments


def _few_biases(bias: Any) -> Any:
    """Before each of them is looked at: hundreds of thousands take a second under the interpreter lock."""
    if isinstance(bias, dict) and len(bias) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} entries, got {len(bias)}")
    return bias


ShortText = Annotated[str, Field(max_length=256)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
SessionId = Annotated[str, Field(min_length=1, max_length=128)]
Word = Annotated[str, Field(min_length=1, max_length=64)]
TemplateArguments = Annotated[dict[str, Any], AfterValidator(_no_reserved)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class Body(Known, BaseModel):
    """What a client sends, or a part of it that may have ignored and neutral fields."""

    @model_validator(mode="before")
    @classmethod
    def _served(cls, body: Any) -> Any:
        return served_fields(body) if isinstance(body, dict) else body


class StreamOptions(Body):
    include_usage: bool = False  # one last chunk with the usage of the whole request
    continuous_usage_stats: bool = False  # the usage so far in every chunk (vLLM)


class Generation(Structured, Body):
    """The fields that both kinds of completion share. Ranges are here also for the OpenAPI document; the engine's
    SamplingParams checks them again, together with constraints between fields."""

    model: str = ""  # "": the served model
    max_tokens: AtLeast0 | None = None
    min_tokens: AtLeast0 = 0
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**63), WHOLE] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Whole | None = None
    stop: Annotated[list[StopString], Field(fail_fast=True)] = []
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] = []
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED_IDS)] | None = None  # vLLM
    bad_words: Annotated[list[Word], Field(max_length=MAX_BAD_WORDS)] = []  # vLLM: texts that the answer must not have
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False  # vLLM: the text ends with the stop string
    skip_special_tokens: bool = True  # vLLM: control tokens have no text in the answer
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**63), WHOLE] | None = None  # vLLM: keep the last; -1: all
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES), BeforeValidator(_few_biases)] = {}
    n: Annotated[int, Field(ge=1, le=128), WHOLE] = 1
    best_of: Annotated[int, Field(ge=1, le=128), WHOLE] | None = None  # draws of which the answer has the best n
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False  # vLLM: token ids in addition to the text
    prompt_logprobs: UpTo20 | None = None  # vLLM: alternatives per prompt token
    cache_salt: ShortText = ""
    session_id: SessionId | None = None  # of the conversation or agent, as in the KV events of vLLM
    service_class: Literal["interactive", "standard", "batch"] | None = None
    priority: Whole = 0  # vLLM: lower runs first; negative: interactive, positive: batch

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: list[str]) -> list[str]:
        if len(stop) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stop)}")
        return stop

    @model_validator(mode="after")
    def _whole_answers_have_them(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: available only without streaming; leave stream out")
        if self.stream and self.draws > self.n:
            raise ValueError("best_of: above n available only without streaming; leave stream out")
        return self

    @model_validator(mode="after")
    def _enough_draws(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of: must be at least n = {self.n}")
        return self

    @property
    def draws(self) -> int:
        """Choices that are generated for each prompt."""
        return self.best_of or self.n

    @field_validator("logit_bias")
    @classmethod
    def _bias_of_ids(cls, bias: dict[str, float]) -> dict[str, float]:
        for key, value in bias.items():
            if not key.isascii() or not key.isdecimal() or len(key) > 10:
                raise ValueError(f"keys must be token ids, got {key[:40]!r}")
            if not -100 <= value <= 100:
                raise ValueError(f"values must be in [-100, 100], got {value}")
        return bias

    @property
    def wanted_class(self) -> str:
        by_priority = "interactive" if self.priority < 0 else "batch" if self.priority > 0 else "standard"
        return self.service_class or by_priority


class Templated(Body):
    """The fields of chats for the template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False  # vLLM: the prompt ends with the text of the last message
    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = None  # vLLM
    chat_template_kwargs: TemplateArguments = {}

    @property
    def template_arguments(self) -> dict[str, Any]:
        """In addition to `add_generation_prompt`."""
        end = {"continue_final_message": True} if self.continue_final_message else {}
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return {**self.chat_template_kwargs, **end, **template}

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self


class CompletionBody(Generation):
    """POST /v1/completions"""

    prompt: list[str | list[int]]  # after validation always a list of prompts
    echo: bool = False
    logprobs: UpTo20 | None = None
    add_special_tokens: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _list_of_prompts(cls, prompt: Any) -> Any:
        """A string, a list of strings, a list of token ids, or a list of lists of token ids."""
        prompt = [whole_ids(one) for one in whole_ids(prompt)] if isinstance(prompt, list) else prompt
        prompts = [prompt] if isinstance(prompt, str) or (isinstance(prompt, list) and _all(prompt, int)) else prompt
        if not isinstance(prompts, list) or not (
            _all(prompts, str) or all(isinstance(p, list) and _all(p, int) for p in prompts)
        ):
            raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
        if not prompts or not all(prompts):
            raise ValueError("must not be empty")
        return prompts

    @model_validator(mode="after")
    def _servable(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 returns only the prompt; send echo: true with it")
        if len(self.prompt) * self.draws > MAX_CHOICES:
            count = f"{len(self.prompt)} prompts x {self.draws} draws"
            raise ValueError(f"prompt: {count} (n, best_of) exceeds {MAX_CHOICES} choices")
        return self


class ChatBody(Generation, Templated):
    """POST /v1/chat/completions"""

    messages: Conversation
    max_tokens: AtLeast1 | None = None
    max_completion_tokens: AtLeast1 | None = None
    logprobs: bool = False
    top_logprobs: UpTo20 = 0
    tools: Tools = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True

    @property
    def forced(self) -> list[Tool] | None:
        """The tools of which the answer must call one; None: no obligation. Raises ValueError."""
        choice = self.tool_choice
        if choice in ("auto", "none"):
            return None
        if choice == "required":
            named = self.tools
        elif isinstance(choice, dict) and isinstance(function := choice.get("function"), dict):
            named = [tool for tool in self.tools if tool.function.name == function.get("name")]
        else:
            raise ValueError(
                'tool_choice: must be auto, none, required or {"type": "function", "function": {"name": ..}}'
            )
        if not named:
            raise ValueError("tool_choice: tools contains no such tool")
        return named

    @property
    def schemas(self) -> list[Any]:
        return [*super().schemas, *(tool.function.parameters for tool in self.forced or ())]

    @property
    def offered(self) -> list[Tool]:
        """The tools for the template."""
        return [] if self.tool_choice == "none" else self.tools

    @model_validator(mode="after")
    def _needs_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class TokenizeBody(Templated):
    """POST /tokenize: a text, or chat messages"""

    model: str = ""
    prompt: str | None = None
    messages: Conversation | None = None
    add_special_tokens: bool = True
    tools: Tools = []
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: send either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str = ""
    tokens: TokenIds


def _all(values: list[Any], kind: type) -> bool:
    """Whether all values are exactly of `kind` (a bool is not an int). False for an empty list. Fast for long lists."""
    return set(map(type, values)) == {kind}
