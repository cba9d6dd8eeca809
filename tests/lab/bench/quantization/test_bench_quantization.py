"""Judging answers behind quantized prefixes, and one small run of the real model."""

import math

import orjson
import pytest

from lab.bench.quantization.command import main
from lab.bench.quantization.quality import Answer, judged, leading


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
    """A small run: close where it is converted, in the pool or everywhere, and about half of the bytes."""
    out = tmp_path / "out.json"
    flags = ["--windows", "1", "--window-tokens", "128", "--new-tokens", "2", "--requests", "1", "--json", str(out)]
    assert main(flags) == 0
    rows = {(row["case"], row["metric"]): row for row in orjson.loads(out.read_bytes())["rows"]}
    for name in ("pool fp8", "pool int8", "arena fp8", "arena int8"):
        perplexity = rows[name, "perplexity"]
        assert perplexity["ours"] == pytest.approx(perplexity["peers"]["bfloat16"], rel=0.05)
        assert perplexity["ours"] != perplexity["peers"]["bfloat16"]
        size = rows[name, "bytes per block"]
        assert 0.5 < size["ours"] / size["peers"]["bfloat16"] < (0.51 if "pool" in name else 0.54)


def test_a_wrong_size_is_refused(capsys):
    assert main(["--window-tokens", "100"]) == 2
    assert "multiple of 32" in capsys.readouterr().err
