"""Command lines of agents: they send long instructions and many tools, in several turns."""

from __future__ import annotations

import json
from collections.abc import Iterator

from lab.clients.runs import Run, Target, Unexpected

INSTRUCTIONS = "You answer questions in one short sentence."
QUESTION = "What is the capital of France?"


def codex(program: str, target: Target) -> Iterator[Run]:
    """codex exec on /v1/responses: its tools and its context of the machine, and a second turn of the conversation."""
    home = target.scratch / "codex"
    home.mkdir(exist_ok=True)
    (home / "instructions.md").write_text(INSTRUCTIONS)
    (home / "config.toml").write_text(
        f'model = "{target.model}"\nmodel_provider = "ours"\nmodel_instructions_file = "{home}/instructions.md"\n'
        f'web_search = "disabled"\napproval_policy = "never"\nsandbox_mode = "read-only"\n'
        f'[model_providers.ours]\nname = "ours"\nbase_url = "{target.url}/v1"\nwire_api = "responses"\n'
        "[analytics]\nenabled = false\n"
        "[features]\nshell_tool = false\nunified_exec = false\n"  # a small model must not run commands here
    )
    begin = [program, "exec", "--skip-git-repo-check", "--json"]
    env = {"CODEX_HOME": str(home), "HOME": str(home)}
    yield Run("exec", [*begin, QUESTION], _answer, env=env)
    yield Run("exec resume", [*begin, "resume", "--last", "And of Italy?"], _answer, env=env)


def _answer(output: str) -> str:
    """The agent's message, and the tokens of the turn."""
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    said = [
        event["item"]["text"]
        for event in events
        if event["type"] == "item.completed" and event["item"]["type"] == "agent_message"
    ]
    ends = [event["usage"] for event in events if event["type"] == "turn.completed"]
    if not said or not ends:
        raise Unexpected("; ".join(str(event) for event in events if "error" in str(event))[:500] or "no answer")
    counts = ends[-1]
    return (
        f"{counts['input_tokens']} prompt tokens, {counts['cached_input_tokens']} of them cached, "
        f"{counts['output_tokens']} output tokens: {said[-1][:80]!r}"
    )
