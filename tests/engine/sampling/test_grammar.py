"""Structured output with a random model: whatever the logits say, the text is what the grammar asks for."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tokenizers
import torch

from engine.checkpoint.model_source import describe
from engine.config.config import EMBEDDED_MODEL
from engine.sampling.grammar import Grammars, _Kept
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow, sample
from engine.text.token_bytes import BYTE_OF
from engine.text.tokenizer import Tokenizer
from net.bodies import decode, encode
from net.http.openai.tools import Function, Tool, ToolText, schema_of_call

EOS = 257
WORDS = ['{"', '":', "tru", "true", "yes", "yesterday", "ab"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}, "c": {"type": "boolean"}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """All bytes, some words, a control token and an end."""
    vocab = {**BYTE_OF} | {"<|x|>": 256, "<|end|>": EOS}
    vocab |= {word: EOS + 1 + i for i, word in enumerate(WORDS)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    core.add_special_tokens(["<|x|>", "<|end|>"])
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(core, special_tokens={"eos_token": "<|end|>"})


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer)


def answer(grammars, grammar, seed, temperature=1.0, masks=None) -> list[int]:
    """Tokens before the end that a model without any idea gives. Its logits have more rows than there are tokens, and
    those are the likeliest."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_tokens=400, temperature=temperature, seed=seed, grammar=grammar)
    ids = [1, 2, 3]
    while len(ids) < 400:
        logits = torch.randn(1, EOS + 20, generator=generator)
        logits[:, EOS + 1 + len(WORDS) :] = 50
        (chosen,) = sample(logits, [SamplingRow(params, ids, 3)], masks or grammars)
        if chosen.token_id == EOS:
            return ids[3:]
        ids.append(chosen.token_id)
    raise AssertionError("the answer has no end")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_of_a_schema(grammars, tokenizer, temperature):
    grammar = grammars.compile("json", json.dumps(SCHEMA))
    for seed in range(10):
        value = json.loads(tokenizer.decode(answer(grammars, grammar, seed, temperature)))
        assert list(value) == ["a", "b", "c"]
        assert isinstance(value["a"], int) and value["b"] in ("x", "yes") and isinstance(value["c"], bool)


def test_regex_and_choice(grammars, tokenizer):
    regex = grammars.compile("regex", "[ab]{3,5}(yes|no)ä")
    choice = grammars.compile("choice", json.dumps(['"quoted"', "yes", "ä\n"]))
    for seed in range(10):
        assert re.fullmatch("[ab]{3,5}(yes|no)ä", tokenizer.decode(answer(grammars, regex, seed)))
        assert tokenizer.decode(answer(grammars, choice, seed)) in ('"quoted"', "yes", "ä\n")


@pytest.mark.parametrize("text", ['{"name": "Zoë", "list": [1, 2.5, true]}', "naïve café 123"])
def test_the_embedded_tokenizer_and_a_sentencepiece_one(text):
    """Every way to write the text in tokens is admitted, the end only behind it."""
    for tokenizer in (Tokenizer.load(describe(EMBEDDED_MODEL)), sentencepiece()):
        grammars = Grammars(tokenizer)
        grammar = grammars.compile("choice", json.dumps([text]))
        written: list[int] = []
        while b"".join(tokenizer.token_bytes(token) for token in written) != text.encode():
            admitted = np.flatnonzero(grammars.allowed(grammar, written))
            left = text.encode()[sum(len(tokenizer.token_bytes(token)) for token in written) :]
            assert len(admitted) and all(left.startswith(tokenizer.token_bytes(int(token))) for token in admitted)
            written.append(int(admitted[-1]))
        assert np.flatnonzero(grammars.allowed(grammar, written)).tolist() == sorted(tokenizer.eos_token_ids)


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral have them: U+2581 for spaces, also before the first word, and lone bytes."""
    words = [
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *map(chr, range(33, 127)),
        "▁",
        "▁1",
        "tr",
        "▁c",
    ]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    merges = [("▁", "1"), ("t", "r"), ("▁", "c")]
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, byte_fallback=True, unk_token="<s>"))
    core.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    steps = tokenizers.decoders
    core.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    core.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(core, special_tokens={"eos_token": "</s>"})


def wants(kind: str, draft: str = "", key: str = "$defs") -> dict:
    """Parameters whose pointers mean their own parts."""
    schema = {"type": "object", "required": ["a"], "additionalProperties": False, key: {"X": {"type": kind}}}
    schema |= {"properties": {"a": {"$ref": f"#/{key}/X"}, "b": {"$ref": "#/properties/a"}, "self": {"$ref": "#"}}}
    return schema | ({"$schema": draft} if draft else {})


DRAFTS = {
    "": "$defs",
    "https://json-schema.org/draft/2020-12/schema": "$defs",
    "http://json-schema.org/draft-07/schema#": "definitions",
    "http://json-schema.org/draft-04/schema#": "definitions",
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_pointers_in_parameters_mean_these_parameters(grammars, tokenizer, draft):
    """Two tools with definitions of the same name, and a recursive schema behind a pointer at the top."""
    key = DRAFTS[draft]
    node = {"type": "object", "properties": {"next": {"$ref": f"#/{key}/N"}}, "additionalProperties": False}
    top = {"$schema": draft, "$ref": f"#/{key}/N", key: {"N": node}}
    given = [wants("integer", draft, key), wants("string", draft, key), top if draft else wants("null")]
    functions = [Function(name=f"f{at}", parameters=schema) for at, schema in enumerate(given)]
    call = schema_of_call([Tool(type="function", function=function) for function in functions])
    grammar = grammars.compile("call", call)
    right = [("f0", {"a": 1, "self": {"a": 2, "b": 3}}), ("f1", {"a": "x"})]
    wrong = [("f0", {"a": "x"}), ("f1", {"a": 1}), ("f0", {"a": 1, "self": {"name": "f0"}}), ("f2", {"x": 1})]
    right += [("f2", {"next": {"next": {}}})] if draft else [("f2", {"a": None})]
    for cases, accepted in ((right, True), (wrong, False)):
        for name, arguments in cases:
            text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
            assert follows(grammars, grammar, tokenizer.encode(text, False)) == accepted, (name, arguments)


def follows(grammars: Grammars, grammar: str, ids: list[int]) -> bool:
    """Whether the grammar allows each token after those before it."""
    return all(grammars.allowed(grammar, ids[:at])[token] for at, token in enumerate(ids))


def test_forced_calls_are_what_the_api_reads(grammars, tokenizer):
    parameters = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    parameters["additionalProperties"] = False
    tools = [Tool(type="function", function=Function(name=name, parameters=parameters)) for name in ("f", "ä")]
    grammar = grammars.compile("call", schema_of_call(tools))
    for seed in range(6):
        content, (call,) = ToolText(9).feed(tokenizer.decode(answer(grammars, grammar, seed)), last=True)
        assert content == "" and call["function"]["name"] in ("f", "ä")
        assert json.loads(call["function"]["arguments"])["a"] in (True, False)


@pytest.mark.parametrize("source", ['start: "ab" /[0-9]+/', 'root ::= "ab" [0-9]+'])
def test_grammars_of_both_syntaxes(grammars, tokenizer, source):
    grammar = grammars.compile("grammar", source)
    for seed in range(3):
        assert re.fullmatch("ab[0-9]+", tokenizer.decode(answer(grammars, grammar, seed)))


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("choice", json.dumps(["<|x|>"]), "<|x|>"),
        ("regex", r"ab <\|end\|>[.]", "ab <|end|>."),
        ("json", json.dumps({"const": "<|end|>"}), '"<|end|>"'),
        ("grammar", 'root ::= "<|x|>" "<|end|>"', "<|x|><|end|>"),
    ],
)
def test_the_text_of_a_control_token_is_spelt(grammars, tokenizer, kind, source, text):
    """The control token itself has no text in the answer, and may end it."""
    grammar = grammars.compile(kind, source)
    for seed in range(3):
        assert tokenizer.decode(answer(grammars, grammar, seed)) == text


def test_a_control_token_that_a_grammar_names_is_that_token(grammars, tokenizer):
    grammar = grammars.compile("grammar", 'start: "ab" <|x|> "b"')
    assert tokenizer.decode(answer(grammars, grammar, 1), skip_special_tokens=False) == "ab<|x|>b"
    assert 256 in answer(grammars, grammar, 1)


@pytest.mark.parametrize(
    "source", ["root = x", "root ::= (", "start: missing", "((((" * 5000, "", 'root ::= "' + "a" * 40_000]
)
def test_what_is_no_grammar_is_a_value_error(grammars, source):
    with pytest.raises(ValueError, match="grammar"):
        grammars.compile("grammar", source)


def test_any_node_goes_on_with_the_same_tokens(grammars, tokenizer):
    """A mask depends on grammar and output alone: states that were never seen, or were forgotten, change nothing."""

    class Forgetful:
        def allowed(self, grammar, output):
            return Grammars(tokenizer).allowed(grammar, output)

    grammar = grammars.compile("json", json.dumps(SCHEMA))
    assert answer(grammars, grammar, 3) == answer(grammars, grammar, 3, masks=Forgetful())


def test_only_rows_with_a_grammar_are_touched(grammars):
    grammar = grammars.compile("regex", "a")
    free, bound = SamplingParams(temperature=0), SamplingParams(temperature=0, grammar=grammar)
    logits = torch.randn(3, EOS + 20, generator=torch.Generator().manual_seed(1))
    rows = [SamplingRow(params, [5], 1) for params in (free, bound, free)]
    tokens = [sampled.token_id for sampled in sample(logits, rows, grammars)]
    assert tokens == [int(logits[0].argmax()), ord("a"), int(logits[2].argmax())]


def test_drafts_are_judged_by_the_grammar(grammars):
    """After a right draft its successor, after a wrong one anything: such rows are thrown away. The rows behind do not
    spoil the state of those before."""
    params = SamplingParams(temperature=0, grammar=grammars.compile("regex", "abc"))
    logits = torch.zeros(1, EOS + 1)
    for draft, wanted in (((), "a"), ((ord("a"),), "b"), ((ord("z"),), None), ((ord("a"), ord("b")), "c")):
        (chosen,) = sample(logits, [SamplingRow(params, [7], 1, draft=draft)], grammars)
        assert wanted is None or chosen.token_id == ord(wanted)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json", '{"type": "objekt"}'),
        ("json", "["),
        ("json", "7"),
        ("call", '{"anyOf": [{"type": "objekt"}]}'),
        ("regex", "(a"),
        ("regex", "(?=a)"),
        ("json", " " * 300_000),
    ],
)
def test_what_cannot_be_compiled(grammars, kind, source):
    for _ in range(2):  # also when it is known
        with pytest.raises(ValueError, match=r"cannot compile|may have"):
            grammars.compile(kind, source)


def test_after_prepare_a_request_waits_for_no_vocabulary(tokenizer, monkeypatch):
    monkeypatch.setattr("engine.sampling.grammar._shared", _Kept(2))  # none of the tests before
    grammars = Grammars(tokenizer)
    grammars.prepare()
    monkeypatch.setattr("llguidance.LLTokenizer", None)
    monkeypatch.setattr("engine.sampling.grammar._shared", _Kept(2))
    assert grammars.allowed(grammars.compile("choice", '["a"]'), []).any()


def test_a_tokenizer_without_an_end_is_prepared_and_refused_by_the_request(tokenizer):
    endless = Grammars(Tokenizer(tokenizer._core))
    endless.prepare()
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        endless.compile("regex", "a")


def test_a_tokenizer_that_gives_no_vocabulary_is_a_warning_and_then_a_refusal(tokenizer, monkeypatch, caplog):
    def refuse(*_, **__):
        raise ValueError("unknown decoder")

    monkeypatch.setattr("llguidance.LLTokenizer", refuse)
    monkeypatch.setattr("engine.sampling.grammar._shared", _Kept(2))  # none of the tests before
    grammars = Grammars(tokenizer)
    grammars.prepare()
    assert "refuses structured output: unknown decoder" in caplog.text
    with pytest.raises(ValueError, match="unknown decoder"):
        grammars.compile("regex", "a")


def test_on_the_wire_and_with_what_it_does_not_go():
    params = SamplingParams(grammar="g")
    assert decode(SamplingParams, encode(params)) == params and params.has_rules
    for more in ({"min_tokens": 1}, {"ignore_eos": True}):
        with pytest.raises(ValueError, match="structured output"):
            SamplingParams(grammar="g", **more)
