"""A draft model of another vocabulary is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.checkpoint.model_source import describe
from engine.config.flags import UsageError, parse
from engine.speculation.draft_source import check_draft, draft_source
from engine.text.tokenizer import Tokenizer
from tests.engine.conftest import TINY_TOKENS


def test_a_vocabulary_that_differs_is_refused(tiny_gguf):
    ours = describe(str(tiny_gguf()))
    tokenizer = Tokenizer.load(ours)
    check_draft(ours, ours, tokenizer)
    check_draft(None, ours, tokenizer)
    larger = replace(ours, config=replace(ours.config, vocab_size=ours.config.vocab_size + 8))
    with pytest.raises(UsageError, match=r"--speculative-model tiny does not fit tiny: .* logits, not"):
        check_draft(larger, ours, tokenizer)
    tokens = ["<|eos|>", "<|bos|>"]
    swapped = describe(
        str(tiny_gguf(metadata={"tokenizer.ggml.tokens": tokens + TINY_TOKENS[2:]}, name="swapped.gguf"))
    )
    with pytest.raises(UsageError, match=r"does not fit tiny: its vocabulary has .* take a smaller model"):
        check_draft(swapped, ours, tokenizer)


def test_only_nodes_that_decode_have_one(tiny_gguf):
    flags = ["--speculative-method", "draft", "--speculative-model", str(tiny_gguf())]
    assert draft_source(parse(flags)).format == "gguf"
    assert draft_source(parse([*flags, "--role", "prefill"])) is None
    assert draft_source(parse([])) is None
