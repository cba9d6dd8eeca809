"""Text that arrives token by token: deltas add up to the text of all tokens, and no character is ever shown in half."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from engine.model.model_error import ModelError
from engine.text.tokenizer import IncrementalDecoder, Tokenizer

IN_VOCABULARY = st.characters(max_codepoint=0x3FFFF, codec="utf-8", exclude_characters="\x04\x06\x13\x14\x16\x1d")
"""SmolLM2's vocabulary lacks 21 bytes: these control characters and what begins characters of unassigned planes."""


def push_in_pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [decoder.push(ids[a:b]) for a, b in pairwise(edges)] + [decoder.flush()]


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 49200), st.integers(0, 300)), max_size=40),  # low ids: bytes and control
    cuts=st.lists(st.integers(0, 100), max_size=40),
    skip=st.booleans(),
)
def test_deltas_of_any_tokens_add_up(embedded_tokenizer, ids, cuts, skip):
    deltas = push_in_pieces(embedded_tokenizer, ids, cuts, skip)
    assert "".join(deltas) == embedded_tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(IN_VOCABULARY, max_size=20))
def test_text_never_shows_half_a_character(embedded_tokenizer, text):
    ids = embedded_tokenizer.encode(text)
    decoder = IncrementalDecoder(embedded_tokenizer, skip_special_tokens=False)
    deltas = [decoder.push([token]) for token in ids]
    assert "".join(deltas) == text and decoder.flush() == ""
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


def test_flush_shows_what_stayed_incomplete(embedded_tokenizer):
    ids = embedded_tokenizer.encode("😀")
    decoder = IncrementalDecoder(embedded_tokenizer)
    assert len(ids) > 1 and decoder.push(ids[:-1]) == "" and decoder.flush() == "\ufffd"


SENTENCEPIECE_TOKENS = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁▁", "é", "<u> x"]


@pytest.fixture(scope="module")
def sentencepiece():
    """The shape of Llama 2's tokenizer: spaces as U+2581, unknown characters as bytes, a space first."""
    vocab = {token: i for i, token in enumerate(SENTENCEPIECE_TOKENS)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "▁")], byte_fallback=True))
    core.add_special_tokens(["<s>", "</s>"])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(core, special_tokens={"eos_token": "</s>"})


PIECES = st.lists(
    st.one_of(
        st.sampled_from([0, 1, *range(258, len(SENTENCEPIECE_TOKENS))]).map(lambda i: [i]),
        st.characters(codec="utf-8").map(lambda c: [2 + byte for byte in c.encode()]),
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(pieces=PIECES, cuts=st.lists(st.integers(0, 100), max_size=20))
def test_sentencepiece_deltas_add_up(sentencepiece, pieces, cuts):
    ids = [token for piece in pieces for token in piece]
    assert "".join(push_in_pieces(sentencepiece, ids, cuts)) == sentencepiece.decode(ids)
    assert sentencepiece.eos_token_ids == (1,)


@settings(max_examples=200, deadline=None)
@given(prompt=PIECES, answer=PIECES)
def test_an_answer_continues_the_text_of_its_prompt(sentencepiece, prompt, answer):
    """Token "▁a" begins a word: behind the text of a prompt, its space is a part of the answer."""
    before, ids = ([token for piece in pieces for token in piece] for pieces in (prompt, answer))
    decoder = IncrementalDecoder(sentencepiece, behind=before)
    assert sentencepiece.decode(before) + decoder.push(ids) + decoder.flush() == sentencepiece.decode(before + ids)


def test_a_decoder_of_another_kind_is_refused():
    core = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="only byte-level and SentencePiece"):
        Tokenizer(core)
