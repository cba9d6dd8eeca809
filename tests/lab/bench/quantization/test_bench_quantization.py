"""Judging answers behind quantized prefixes, and one small run of the real model."""

import math
from pathlib import Path

import orjson
import pytest
import torch

from engine.checkpoint.model_source import describe
from engine.config.config import EMBEDDED_MODEL
from engine.model.ops.quantized import BLOCKS
from engine.text.tokenizer import Tokenizer
from lab.bench.quantization.command import main, text_tokens
from lab.bench.quantization.prefixes import Prefixes, load_model
from lab.bench.quantization.quality import Answer, judged, leading
from lab.docs.figures import Result

ROOT = Path(__file__).resolve().parents[4]


def test_answers_are_judged_window_by_window():
    exact = [Answer([1.0, 3.0], [5, 6], [1, 2, 3, 4]), Answer([2.0], [7], [8, 9])]
    others = [Answer([1.5, 3.5], [5, 0], [1, 2, 0, 4]), Answer([2.5], [7], [8, 9])]
    verdict = judged(others, exact)
    assert verdict.perplexity == pytest.approx(math.exp(2.5))
    assert verdict.exact_perplexity == pytest.approx(math.exp(2))
    assert verdict.top1 == pytest.approx(2 / 3)
    assert (verdict.agreed, verdict.length, verdict.identical) == (2, 3, 0.5)


def test_windows_must_match():
    with pytest.raises(ValueError, match="zip"):
        judged([Answer([1.0], [1], [1])], [])


def test_leading():
    assert [leading([1, 2], [1, 2]), leading([1], [2]), leading([], [1]), leading([1, 2, 3], [1, 2])] == [2, 0, 0, 2]


def test_the_embedded_model_hardly_notices(tmp_path):
    """A small run: close where it is converted, in the pool, on the wire or everywhere, and about half of the bytes."""
    out = tmp_path / "out.json"
    flags = ["--windows", "1", "--window-tokens", "128", "--new-tokens", "2", "--requests", "1", "--json", str(out)]
    assert main(flags) == 0
    rows = {(row["case"], row["metric"]): row for row in orjson.loads(out.read_bytes())["rows"]}
    for name in (f"{what} {dtype}" for what in ("pool", "wire", "arena") for dtype in ("fp8", "int8")):
        perplexity = rows[name, "perplexity"]
        assert perplexity["ours"] == pytest.approx(perplexity["peers"]["bfloat16"], rel=0.05)
        assert perplexity["ours"] != perplexity["peers"]["bfloat16"]
        size = rows[name, "bytes per block"]
        assert 0.5 < size["ours"] / size["peers"]["bfloat16"] < (0.54 if "arena" in name else 0.51)
    int4, size = rows["pool int4", "perplexity"], rows["pool int4", "bytes per block"]
    assert int4["ours"] == pytest.approx(int4["peers"]["bfloat16"], rel=0.05)
    assert int4["ours"] != int4["peers"]["bfloat16"]
    assert 0.3 < size["ours"] / size["peers"]["bfloat16"] < 0.36
    for name in ("weights stored", "weights int8", "weights int4", "weights fp8"):
        perplexity = rows[name, "perplexity"]
        assert perplexity["ours"] == pytest.approx(perplexity["peers"]["bfloat16"], rel=0.05)
        assert perplexity["ours"] != perplexity["peers"]["bfloat16"]
    # Sixteen values without calibration double the perplexity of this short text, and raise that of the whole one by
    # more than half (docs/operations.md); the products themselves are held against float64 in
    # tests/engine/model/ops/test_quantized.py.
    mxfp4 = rows["weights mxfp4", "perplexity"]
    assert 1.9 < mxfp4["ours"] / mxfp4["peers"]["bfloat16"] < 2.4


EXPENSIVE = {"weights fp8": "`fp8` raises it by some hundredths", "weights mxfp4": "raises it by more than half"}
"""Rows of weights that cost more than 1 % of perplexity -> what docs/operations.md says about them."""


def test_the_docs_name_every_type_of_weights_that_costs_more_than_a_hundredth():
    changes = {
        row["case"]: row["ours"]
        for row in Result.newest("quantization").rows
        if row["case"].startswith("weights ") and row["metric"] == "perplexity change"
    }
    assert {case for case, change in changes.items() if change > 1} == set(EXPENSIVE)
    assert 2 < changes["weights fp8"] < 10 and 50 < changes["weights mxfp4"] < 100
    page = " ".join((ROOT / "docs" / "operations.md").read_text().split())
    assert all(said in page for said in EXPENSIVE.values())


def test_types_of_256_inputs_cannot_hold_the_embedded_model():
    inputs = describe(EMBEDDED_MODEL).config.hidden_size
    too_long = {kind for kind, (each, _) in BLOCKS.items() if inputs % each}
    assert too_long == {"q4_k", "q5_k", "q6_k"}


def test_a_hand_over_leaves_the_first_token_as_it_was():
    """And every later one attends to the encoded prefix. Its last block is encoded too, other than in the pool."""
    source = describe(EMBEDDED_MODEL)
    window = text_tokens(Tokenizer.load(source, "auto"), 128)
    with torch.no_grad():
        prefixes = Prefixes(load_model(source), 128 + 4)
        prefixes.compute(window[:64])
        exact, pooled = (prefixes.answer(window, 4, name) for name in ("", "int8"))
        moved = prefixes.answer_elsewhere(window, 4, "int8", exact)
    assert len(moved.losses) == len(moved.best) == len(exact.losses) == 64
    assert (moved.losses[0], moved.generated[0]) == (exact.losses[0], exact.generated[0])
    assert pooled.losses[0] != exact.losses[0]
    differences = [abs(one - other) for one, other in zip(moved.losses[1:], exact.losses[1:], strict=True)]
    assert 0 < sum(differences) / 63 < 0.1
    assert len(moved.generated) == len(exact.generated) == 4


def test_a_wrong_size_is_refused(capsys):
    assert main(["--window-tokens", "100"]) == 2
    assert "multiple of 32" in capsys.readouterr().err
