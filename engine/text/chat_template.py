"""ChatTemplate: messages -> prompt text, through the model's jinja2 template in a sandbox.

Templates come with the model or from clients, and messages from clients, so none is trusted: in the sandbox, a template
can change only its own variables, and every failure of the rendering becomes the client's ValueError.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from engine.text.spelt_json import spelt_json
from engine.text.tool_prompt import with_tools


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. `variables`: further variables that templates use: bos_token, eos_token, ... Raises
    ValueError for a text that is no template."""

    def __init__(self, template: str, variables: Mapping[str, str]) -> None:
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        env.filters["tojson"] = spelt_json  # jinja2's own filter escapes for HTML
        env.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._variables = dict(variables)
        try:
            self._template = env.from_string(template)
            self._shows_tools = "tools" in jinja2.meta.find_undeclared_variables(env.parse(template))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid jinja2: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt's text, with special tokens as text. The template gets `kwargs` (tools, enable_thinking, ...); if
        it does not show tools, the system message describes them.
        Raises ValueError for messages that are malformed or that the template refuses."""
        context = {**self._variables, "tools": None, "documents": None, **kwargs}
        context |= {"messages": checked(messages), "add_generation_prompt": add_generation_prompt}
        try:
            if not self._shows_tools:
                context["messages"] = with_tools(context["messages"], kwargs.get("tools") or [])
            return self._template.render(context)
        except Exception as error:  # a template evaluates expressions on the client's data: any exception is possible
            raise ValueError(f"the chat template refused the messages: {error}") from error


def checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the form for templates: content is a string (text parts joined by newlines, like vLLM) or None."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError("messages must be a non-empty list")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] must be an object with a string 'role'")
    return [{**message, "content": _text(message.get("content"), index)} for index, message in enumerate(messages)]


def _text(content: Any, index: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"messages[{index}].content must be a string or a list of parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"messages[{index}].content has a part of type {kind!r}; this model reads only text")
    return "\n".join(part["text"] for part in content)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
