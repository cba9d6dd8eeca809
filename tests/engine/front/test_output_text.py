"""The text of an answer, token by token: where stop strings count and end it."""

from __future__ import annotations

import time

import pytest
import tokenizers

from cache.block import BlockGeometry
from cache.keys import root_key
from engine.front.flight import Flight, OutputText
from engine.front.persistence import Persistence
from engine.observe.timeline import Timeline
from engine.sampling.params import SamplingParams
from engine.text.token_bytes import BYTE_OF
from engine.text.tokenizer import Tokenizer

ROOT = root_key("toy", BlockGeometry(2, 1, 4, 4, "float32"))
END = 256


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte, and an end."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE({**BYTE_OF, "<|end|>": END}, []))
    core.add_special_tokens(["<|end|>"])
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(core, special_tokens={"eos_token": "<|end|>"})


def written(tokenizer: Tokenizer, said: str, prompt: int = 1, **sampling) -> tuple[str, str | None, int | str | None]:
    """(text, finish_reason, stop_reason) of an answer whose tokens are the bytes of `said`, then an end."""
    now = time.monotonic()
    params = SamplingParams(max_tokens=99, **sampling)
    deadline, persistence = now + 60, Persistence(now, now + 60, 1)
    flight = Flight("r", [prompt], 1, params, "standard", ROOT, Timeline("r", 1), deadline, now, persistence)
    output, text = OutputText(tokenizer, flight), ""
    for token in [*tokenizer.encode(said, False), END]:
        flight.token_ids.append(token)
        told = output.push(token, None, "stop" if token == END else None)
        text += told.text
        if told.finish_reason is not None:
            return text, told.finish_reason, told.stop_reason
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("least", "text"), [(0, "ab"), (2, "ab"), (3, "abcdab"), (4, "abcdab"), (7, "abcdabcd"), (99, "abcdabcd")]
)
def test_stop_strings_count_behind_the_least_tokens(tokenizer, least, text):
    got, reason, stop = written(tokenizer, "abcdabcd", stop=("cd",), min_tokens=least)
    assert (got, reason, stop) == (text, "stop", None if text == "abcdabcd" else "cd")


def test_an_answer_begins_with_the_space_behind_its_prompt():
    """Of Llama 2's kind: the space between the prompt's last word and the answer's first one is in the answer."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE({"▁is": 0, "▁": 1, "a": 2, "b": 3, "<|end|>": END}, []))
    core.decoder = tokenizers.decoders.Metaspace()
    core.add_special_tokens(["<|end|>"])
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    assert written(Tokenizer(core), "▁ab", prompt=0)[0] == " ab"
    assert written(Tokenizer(core), "▁ab", prompt=END)[0] == "ab", "behind a control token, it begins a text"


def test_the_stop_may_be_in_the_text(tokenizer):
    shown = {"include_stop_str_in_output": True}
    assert written(tokenizer, "abcd", stop=("bc",), **shown) == ("abc", "stop", "bc")
    assert written(tokenizer, "ab", stop_token_ids=(END,), skip_special_tokens=False, **shown)[0] == "ab<|end|>"
    assert written(tokenizer, "ab", stop_token_ids=(END,), **shown)[0] == "ab", "a control token has no text"
    assert written(tokenizer, "ab", skip_special_tokens=False, **shown)[0] == "ab", "the end of the model is no stop"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, None),
        ({"stop_token_ids": (END,)}, END),
        ({"stop_token_ids": (7,)}, None),
        ({"stop": ("d",), "stop_token_ids": (END,)}, "d"),
    ],
)
def test_the_reason_of_a_stop_is_the_text_or_the_token_that_the_client_named(tokenizer, asked, told):
    assert written(tokenizer, "abcd", **asked)[1:] == ("stop", told)
