"""Limits of this machine: the best of several measurements, and rows that exceed them."""

from __future__ import annotations

import io

import pytest
import torch

from lab.bench.attention.on_cpu import shares
from lab.bench.common.results import Row, exceeded, marked, report, table
from lab.bench.common.timing import best_in_turns
from lab.bench.ops import limits
from lab.bench.ops.limits import best_rate, gemm_rate, packed_by_onednn, read_rate


def test_more_threads_have_at_least_the_rate_of_one() -> None:
    """As on the machine where two threads reached 70 and one 94 GFLOP/s."""
    before, seen = torch.get_num_threads(), []
    rates = {1: iter([90.0, 94.0, 80.0]), 2: iter([70.0, 60.0, 65.0])}

    def rate() -> float:
        seen.append(torch.get_num_threads())
        return next(rates[seen[-1]])

    assert best_rate(rate, 2) == 94
    assert seen == [1, 2] * 3  # in turns
    assert torch.get_num_threads() == before


def test_the_fastest_product_of_the_best_round_counts(monkeypatch) -> None:
    """Of two shapes; the second is fast in the second round only."""
    monkeypatch.setattr(limits, "SHAPES", ((1, 1, 500), (1, 1, 1000)))
    monkeypatch.setattr(limits, "products_of", lambda m, k, n, dtype: [(2 * m * k * n, lambda: None)])
    rounds = iter([[[1e-6], [4e-6]], [[1e-6], [1e-6]], [[1e-6], [4e-6]]])
    monkeypatch.setattr(limits, "best_in_turns", lambda seconds, *contenders: next(rounds))
    assert gemm_rate(torch.float32, 1) == pytest.approx(2 * 1000 / 1e-6 / 1e9)


def test_real_limits(monkeypatch) -> None:
    monkeypatch.setattr(limits, "SHAPES", ((64, 32, 48), (16, 64, 16)))
    monkeypatch.setattr(limits, "SECONDS", 0.001)
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "PART_BYTES", 1 << 18)
    assert gemm_rate(torch.float32, 2) > 0 and read_rate(2) > 0


def test_packed_products_are_products() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64), torch.randn(48, 64)
    product = packed_by_onednn(weight)
    if product is None:
        pytest.skip("this torch has no packed product")
    torch.testing.assert_close(product(x), x @ weight.T)


def test_each_call_counts_with_its_best_round_and_contenders_alternate() -> None:
    order: list[str] = []
    best = best_in_turns(1e-9, [lambda: order.append("a"), lambda: order.append("b")], [lambda: order.append("c")])
    assert order == ["a", "c", "a", "b", "c"]  # the first of each is a warm-up
    assert [len(each) for each in best] == [2, 1] and all(0 < s < 60 for each in best for s in each)


ROWS = [
    Row("avx2, float32, prefill x1, 2 threads", "rate", "GFLOP/s", 188.0, limits={"GEMM": 70.0}, note="seen"),
    Row("avx2, float32, prefill x8, 2 threads", "rate", "GFLOP/s", 69.0, limits={"GEMM": 70.0}),
    Row("avx2, float32, decode x8, 2 threads", "time", "us", 9.0, limits={"read": 1.0}),
]


def test_a_rate_above_its_limit_is_marked_in_the_table_and_the_file() -> None:
    assert [exceeded(row) for row in ROWS] == [["GEMM"], [], []]  # a time may exceed the least time
    first, second, third = table(ROWS).splitlines()[1:]
    assert "2.69x invalid" in first and "0.99x" in second and "invalid" not in second + third
    assert marked(ROWS[0]).note == "seen; invalid limit GEMM: a rate exceeds it"
    assert marked(ROWS[1]) is ROWS[1]
    out = io.StringIO()
    report({}, ROWS, None, out)
    assert "2.69x invalid" in out.getvalue()
    assert "note: seen; invalid limit GEMM: a rate exceeds it\n" in out.getvalue()


def test_shares_name_the_invalid_limit() -> None:
    assert shares(ROWS[:2]) == [
        "share of GEMM (goal 0.6): avx2, float32, 2 threads: 0.99 to 2.69, invalid limit",
    ]
