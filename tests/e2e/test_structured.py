"""Structured output on a real cluster: the grammar travels from the acceptor to the node that samples."""

from __future__ import annotations

import json
import re

from lab.launch import rest
from tests.e2e.conftest import Start

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Oslo", "Rome"]}, "rain": {"type": "boolean"}},
    "required": ["name", "rain"],
    "additionalProperties": False,
}


def test_a_random_model_writes_what_it_is_asked_for(start: Start, tiny_model):
    """The first token comes from the prefill node, the others from the decode node, with drafts judged."""
    flags = ("--speculative-method", "ngram", "--speculative-length", "fixed", "--prompt-lookup-min", "1")
    with start("prefill=1,decode=1", *tiny_model, *flags, "--calibration-ms", "0") as cluster:

        def ask(seed: int, **body: object) -> str:
            body |= {"prompt": "Oslo or Rome? " * 4, "max_tokens": 80, "seed": seed}
            choice = rest.post(f"{cluster.nodes[seed % 2].url}/v1/completions", body)["choices"][0]
            assert choice["finish_reason"] == "stop"
            return choice["text"]

        for seed in range(2):
            form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
            answer = json.loads(ask(seed, response_format=form, temperature=seed % 2))
            assert answer["name"] in ("Oslo", "Rome") and isinstance(answer["rain"], bool)
            assert re.fullmatch("(Oslo|Rome)( [0-9]{2}){8}", ask(seed, guided_regex="(Oslo|Rome)( [0-9]{2}){8}"))
