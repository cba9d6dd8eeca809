"""CpuOps: every operation against float64, next to torch in the same dtype, at every level of this CPU. All pairs of a
level and a dtype only among the heavy tests.

The rule: |ours - exact| <= 2 |torch - exact| + eps, of the largest errors of a result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attention.cpu.level import levels_here
from engine.model.ops import choice as ops_choice
from engine.model.ops import interface as ops_module
from engine.model.ops.choice import choose_ops
from engine.model.ops.cpu import ELEMENTS, CpuOps
from engine.model.ops.huge_pages import HugePages
from engine.model.ops.interface import Linear, TorchOps
from net.compiled import NotCompiled
from tests.heavy import best_first

HERE = levels_here()
pytestmark = pytest.mark.skipif(not HERE, reason="CpuOps needs x86 with AVX2, or aarch64")
EVERY = best_first(HERE, list(ELEMENTS))

EPS = 1e-5
SHAPES = [(64, 96), (576, 960), (100, 38), (33, 16), (1536, 34)]
"""(inputs, outputs): whole blocks, the embedded model's, and ends inside a step, a tile and a block."""
ROWS = [*range(1, 27), 40, 100, 513]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


DTYPE = [torch.bfloat16]
"""Of `random`'s numbers: that of the fixture `ops`."""


@pytest.fixture(
    params=[
        pytest.param(one.values, marks=one.marks, id=f"{one.values[0]}-{str(one.values[1]).removeprefix('torch.')}")
        for one in EVERY
    ]
)
def ops(request) -> CpuOps:
    level, DTYPE[0] = request.param
    return CpuOps(level, DTYPE[0])


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DTYPE[0])


def assert_close(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    assert ours.shape == plain.shape and ours.isfinite().all()
    error, allowed = (ours - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 2 * allowed + EPS * exact.abs().max(), (error, allowed)


def against_float64(run: Callable[..., Tensor], plain: Callable[..., Tensor], *arguments: Tensor) -> None:
    assert_close(run(*arguments), plain(*arguments), plain(*(a.double() for a in arguments)))


# --- products


def check_rows(run: Linear, plain: Linear, exact: Linear, inputs: int) -> None:
    """`exact` takes float64. Every number of rows, each the first of the same 513."""
    x = random(max(ROWS), inputs, seed=9)
    truth, theirs = exact(x.double()), plain(x)
    for m in ROWS:
        assert_close(run(x[:m]), theirs[:m], truth[:m])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_linear(ops, shape, biased):
    weight, bias = random(shape[1], shape[0], scale=0.1), random(shape[1], seed=1) if biased else None
    exact = TorchOps().linear(weight.double(), None if bias is None else bias.double())
    check_rows(ops.linear(weight, bias), TorchOps().linear(weight, bias), exact, shape[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_linear(ops, shape, activation):
    weight = random(shape[1], shape[0], scale=0.3)
    made = [each.gated_linear(w, activation) for each, w in ((ops, weight), (TorchOps(), weight))]
    check_rows(*made, TorchOps().gated_linear(weight.double(), activation), shape[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_vocabulary(ops, shape):
    weight = random(shape[1], shape[0])
    vocabulary = ops.vocabulary(weight)
    for m in (1, 7, 300):
        ids = torch.randint(0, shape[1], (2 * m,))[::2]
        assert torch.equal(vocabulary.embed(ids), weight[ids])
        x = random(m, shape[0], seed=m)
        logits = vocabulary.logits(x)
        assert logits.dtype == torch.float32
        assert_close(logits, F.linear(x, weight).float(), F.linear(x.double(), weight.double()))
    for wrong in (-1, shape[1]):
        with pytest.raises(IndexError, match=f"0 .. {shape[1] - 1}"):
            vocabulary.embed(torch.tensor([0, wrong]))


def test_groups_of_rows(ops):
    weight = random(4, 48, 64, scale=0.2)
    for ends in ([3, 3, 40, 41], [0, 0, 0, 5], [0, 0, 0, 0]):
        x, at = random(ends[-1], 64), torch.tensor(ends, dtype=torch.int32)
        owner = torch.searchsorted(at, torch.arange(ends[-1]), right=True)
        exact = torch.einsum("ti,toi->to", x.double(), weight[owner].double())
        ours = ops.grouped_linear(list(weight))(x, at)
        assert ours.shape == exact.shape
        if len(x):
            assert_close(ours, exact.to(DTYPE[0]), exact)


@pytest.mark.parametrize("wide", [False, True], ids=["as stored", "in float32"])
def test_products_of_heads(ops, wide, monkeypatch):
    monkeypatch.setattr(ops_module, "faster_in_float32", lambda dtype: wide)
    weight = random(3, 24, 40, scale=0.2)
    for x in (random(5, 3, 24), random(5, 3, 60)[..., 10:34], random(0, 3, 24)):
        exact = torch.einsum("thi,hio->tho", x.double(), weight.double())
        ours = ops.per_head(weight)(x)
        assert ours.shape == exact.shape
        assert ours.dtype == DTYPE[0]
        if len(x):
            assert_close(ours, exact.to(DTYPE[0]), exact)


def test_only_16_bit_products_are_widened():
    assert not ops_module.faster_in_float32(torch.float32)
    assert not ops_module.faster_in_float32(torch.float64)


def test_strided_rows_and_no_rows(ops):
    weight = random(96, 64)
    wide = random(10, 200)
    for x in (wide[:, 8:72], wide[::2, :64], random(64, 10).T, random(0, 64)):
        whole = x.contiguous()
        for make in (ops.linear, ops.gated_linear):
            assert torch.equal(make(weight)(x), make(weight)(whole))
        assert torch.equal(ops.rms_norm(x, weight[0], EPS), ops.rms_norm(whole, weight[0], EPS))


def test_the_packed_weight_is_the_only_copy(ops):
    for make in (ops.linear, ops.gated_linear, ops.vocabulary):
        weight = random(96, 64)
        kept, gone = make(weight), weakref.ref(weight)
        assert torch.equal(weight, random(96, 64))
        del weight
        assert gone() is None and kept is not None


# --- rows


@pytest.mark.parametrize("width", [16, 37, 576])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_norms_and_activations(ops, width, rows):
    plain, weight = TorchOps(), random(width, seed=1)
    x, delta = random(rows, width, seed=2), random(rows, width, seed=3)
    against_float64(lambda a, w: ops.rms_norm(a, w, EPS), lambda a, w: plain.rms_norm(a, w, EPS), x, weight)
    both = ops.add_rms_norm(x.clone(), delta, weight, EPS), plain.add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(both[0][0], both[1][0])
    assert_close(both[0][1], both[1][1], plain.rms_norm(both[1][0].double(), weight.double(), EPS))
    gate_up = random(rows, 2 * width, seed=4, scale=4)
    against_float64(ops.silu_mul, plain.silu_mul, gate_up)
    against_float64(ops.gelu_tanh_mul, plain.gelu_tanh_mul, gate_up)


def test_activations_of_large_numbers(ops):
    gates = torch.tensor([-6e4, -300, -88, -20, -0.0, 0.0, 20, 88, 300, 6e4]).to(DTYPE[0])
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
    for run, plain in ((ops.silu_mul, F.silu), (ops.gelu_tanh_mul, lambda x: F.gelu(x, approximate="tanh"))):
        torch.testing.assert_close(run(gate_up)[0].double(), plain(gates.double()), rtol=2**-8, atol=1e-6)


def test_norm_of_heads_inside_a_row(ops):
    qkv, weight = random(5, 8, 32), random(32, seed=1)
    ours = ops.rms_norm(qkv[:, 2:5], weight, EPS)
    assert_close(
        ours,
        TorchOps().rms_norm(qkv[:, 2:5], weight, EPS),
        TorchOps().rms_norm(qkv[:, 2:5].double(), weight.double(), EPS),
    )


# --- what follows attention


def tail_of(
    ops: TorchOps, by_name: dict[str, Tensor], activation: str
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return ops.tail(
        ops.linear(by_name["o"], by_name.get("o_bias")),
        by_name["norm"],
        ops.gated_linear(by_name["gate_up"], activation),
        ops.linear(by_name["down"]),
        by_name["next_norm"],
        EPS,
        ops.linear(by_name["following"]) if "following" in by_name else None,
    )


@pytest.mark.parametrize("sizes", [(96, 160, 64), (576, 1536, 576), (90, 70, 50)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias and following"])
def test_tail(ops, sizes, activation, biased):
    hidden, inner, heads = sizes
    given = {
        "o": random(hidden, heads, seed=1, scale=0.1),
        "gate_up": random(2 * inner, hidden, seed=2, scale=0.1),
        "down": random(hidden, inner, seed=3, scale=0.1),
        "norm": random(hidden, seed=4),
        "next_norm": random(hidden, seed=5),
    }
    if biased:
        given |= {"o_bias": random(hidden, seed=6), "following": random(hidden + 10, hidden, seed=7, scale=0.1)}
    wide = {name: weight.double() for name, weight in given.items()}
    run = tail_of(ops, given, activation)
    for m in (1, 17, 33, 191, 192, 600):
        attended, x = random(m, heads, seed=7), random(m, hidden, seed=8)
        exact = tail_of(TorchOps(), wide, activation)(attended.double(), x.double())
        plain = tail_of(TorchOps(), given, activation)(attended, x)
        for ours, theirs, truth in zip(run(attended.clone(), x.clone()), plain, exact, strict=True):
            assert_close(ours, theirs, truth)
    assert [len(result) for result in run(random(0, heads), random(0, hidden))] == [0, 0]


def test_threads_agree_to_the_bit(ops):
    """Each result is summed by one thread in one order, so their number changes nothing: what the tests of one thread
    show holds for all."""
    given = {"o": random(96, 64), "gate_up": random(320, 96), "down": random(96, 160)}
    given |= {"norm": random(96, seed=4), "next_norm": random(96, seed=5), "following": random(70, 96, seed=6)}
    ids = torch.arange(640) % 96

    def all_operations(m: int) -> list[Tensor]:
        attended, x = random(m, 64), random(m, 96)
        vocabulary = ops.vocabulary(given["o"])
        return [
            *tail_of(ops, given, "silu")(attended, x.clone()),
            ops.linear(given["gate_up"])(x),
            ops.gated_linear(given["gate_up"])(x),
            vocabulary.logits(attended),
            vocabulary.embed(ids[:m]),
            *ops.add_rms_norm(x.clone(), x, given["norm"], EPS),
            ops.silu_mul(x),
        ]

    for m in (1, 3, 33, 640):
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(all_operations(m))
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


# --- memory, choice


def test_memory_is_aligned_disjoint_and_grows():
    memory = HugePages()
    taken = [memory.take(*shape) for shape in ((3, 5), (33 << 20,), (7,), (1, 2, 3))]
    for i, tensor in enumerate(taken):
        assert tensor.data_ptr() % 64 == 0
        tensor.view(-1)[[0, -1]] = i + 1.0
    assert [tensor.view(-1)[[0, -1]].tolist() for tensor in taken] == [[1, 1], [2, 2], [3, 3], [4, 4]]


def test_choice(monkeypatch, caplog):
    """What was measured decides, and the log says it. The best level loses by more than the noise only."""
    times = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    monkeypatch.setattr(ops_choice, "lower", lambda *_: [])
    monkeypatch.setattr(ops_choice, "seconds_of", lambda among, weight, check: times)
    for dtype in ELEMENTS:
        made = choose_ops("cpu", "cpu", dtype)
        assert isinstance(made, CpuOps) and made.dtype == dtype and made.level == HERE[0]
    times[1] = [0.9, 1.0, 1.0]
    assert isinstance(choose_ops("cpu", "cpu", torch.float32), CpuOps)
    times[1] = [0.4, 1.0, 2.0]
    with caplog.at_level("INFO"):
        assert type(choose_ops("cpu", "cpu", torch.float32)) is TorchOps
    (message,) = (message for message in caplog.messages if message.startswith("matrix products by torch"))
    assert "in float32" in message and f"our kernels of level {HERE[0]} 1000.00 ms for 1 rows" in message
    assert "torch 400.00 ms for 1 rows, 1000.00 ms for 8 rows, 2000.00 ms for 128 rows" in message
    for other in (("torch", "cpu", torch.bfloat16), ("cpu", "cpu", torch.float64), ("torch", "cuda", torch.bfloat16)):
        assert type(choose_ops(*other)) is TorchOps


@pytest.mark.skipif(len(HERE) == 1, reason="this CPU has one level")
def test_a_lower_level_is_chosen_if_it_is_faster_and_the_level_is_not_named(monkeypatch, caplog):
    asked = []

    def lower(level, bfloat16, is_compiled):
        asked.append((level, bfloat16))
        return [HERE[-1]]

    monkeypatch.setattr(ops_choice, "lower", lower)
    monkeypatch.setattr(
        ops_choice, "seconds_of", lambda among, weight, check: [[2.0] * 3, [1.0] * 3, [3.0] * 3][: len(among)]
    )
    with caplog.at_level("INFO"):
        made = choose_ops("cpu", "cpu", torch.bfloat16)
    assert isinstance(made, CpuOps) and made.level == HERE[-1] and asked == [(HERE[0], True)]
    assert f"matrix products by our kernels of level {HERE[-1]}, measured with" in caplog.text
    named = choose_ops("cpu", "cpu", torch.float32, HERE[0])
    assert type(named) is TorchOps and len(asked) == 1  # it was measured against torch alone


def test_the_measurement_computes_by_all():
    seen, checks = [], []

    class Noting(TorchOps):
        def linear(self, weight, bias=None):
            run = super().linear(weight, bias)
            return lambda x: (seen.append((x.dtype, len(x))), run(x))[1]

    weight = torch.full((48, 64), 0.5, dtype=torch.float16)
    times = ops_choice.seconds_of([CpuOps(HERE[0], torch.float16), Noting()], weight, lambda: checks.append(1))
    assert len(checks) == len(ops_choice.ROWS) * (ops_choice.ROUNDS + 1)
    assert all(0 < took < 60 for each in times for took in each)
    assert seen == [(torch.float16, rows) for rows in ops_choice.ROWS for _ in range(ops_choice.ROUNDS + 1)]


def test_a_cpu_without_kernels_is_told_so(monkeypatch, caplog):
    monkeypatch.setattr("attention.cpu.level.cpu_features", lambda: frozenset({"sse2"}))
    monkeypatch.setattr("attention.cpu.build.cpu_features", lambda: frozenset({"sse2"}))
    assert type(choose_ops("cpu", "cpu", torch.bfloat16)) is TorchOps
    assert "lacks AVX2" in caplog.text
    with pytest.raises(NotCompiled, match="--cpu-level avx2: this CPU lacks avx2"):
        choose_ops("cpu", "cpu", torch.bfloat16, "avx2")


def test_another_type_than_the_models_takes_torch(ops):
    weight, x = torch.randn(40, 24).double(), torch.randn(3, 24).double()
    assert torch.equal(ops.linear(weight)(x), F.linear(x, weight))
    assert torch.equal(ops.vocabulary(weight).logits(x), F.linear(x, weight).float())
    assert torch.equal(ops.rms_norm(x, weight[0], EPS), TorchOps().rms_norm(x, weight[0], EPS))


def test_a_row_does_not_depend_on_the_rows_beside_it(ops):
    """So that a request's tokens do not depend on what else is served."""
    run, x = ops.linear(random(70, 96)), random(300, 96)
    whole = run(x)
    for rows in (1, 2, 3, 7, 13, 40):
        assert torch.equal(run(x[:rows]), whole[:rows]), rows
