"""Rows on their way and their sums: exactly what torch computes, at sizes below and above those written past caches."""

from __future__ import annotations

import ctypes
import subprocess
from platform import machine

import pytest
import torch
from torch import Tensor

from net import compiled
from net.rounds import native
from net.rounds.layout import CODES, TYPES, Layout

INT8, FP8 = CODES.index("int8"), CODES.index("fp8")
ODD = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-41, 3.3895e38])


LEVELS = {"avx2": ("-mavx2", "-mf16c"), "plain": ()}
"""What lanes.h has for other CPUs than this one, by the compiler's flags."""


@pytest.fixture(params=["this CPU", *(LEVELS if machine() == "x86_64" else ())])
def level(request, monkeypatch, tmp_path_factory) -> None:
    """The calls as they are on such a CPU."""
    if request.param == "this CPU":
        return
    path = tmp_path_factory.getbasetemp() / f"rounds-{request.param}.so"
    if not path.exists():
        flags = (*compiled.C_FLAGS, "-fwrapv", *LEVELS[request.param])
        subprocess.run([compiled.c_compiler(), *flags, str(native.FOLDER / "rounds.c"), "-o", str(path)], check=True)
    made = native.typed(ctypes.CDLL(str(path)), native._WAITS)
    monkeypatch.setattr(native, "library", lambda: made)


class Round:
    """`tokens` tokens, each sent to all of `ranks` ranks; the messages and the answers are plain tensors."""

    def __init__(self, x: Tensor, ranks: int, codes: str = "none", own: int = -1) -> None:
        tokens, hidden = x.shape
        self.layout = layout = Layout(tokens, hidden, ranks, str(x.dtype).removeprefix("torch."), codes)
        self.messages = [_aligned(layout.message_bytes) for _ in range(ranks)]
        self._room = [torch.zeros(tokens, dtype=torch.int32) for _ in range(ranks)]
        self._kept = (
            x,
            torch.arange(ranks).repeat(tokens, 1),
            torch.rand(tokens, ranks),
            torch.arange(ranks, dtype=torch.int32),
            torch.empty(tokens, ranks, dtype=torch.int32),
        )
        self.d = d = native.Dispatch()
        d.x, d.chosen, d.weights, d.table, d.sent = (one.data_ptr() for one in self._kept)
        for rank in range(ranks):
            d.desks[rank], d.tokens[rank] = self.messages[rank].data_ptr(), self._room[rank].data_ptr()
        d.num_tokens, d.hidden, d.top_k, d.columns, d.slots, d.ranks = tokens, hidden, ranks, 1, 1, ranks
        d.at_scales, d.at_pair_rows = layout.at_scales, layout.at_pair_rows
        d.at_pair_slots, d.at_pair_weights = layout.at_pair_slots, layout.at_pair_weights
        d.type, d.coded, d.own = TYPES.index(layout.dtype), layout.coded, own
        native.library().mr_dispatch(ctypes.addressof(d))

    def rows(self, rank: int) -> Tensor:
        x = self._kept[0]
        return self.messages[rank][: x.nbytes].view(x.dtype).view(x.shape)

    def combine(self, answers: list[Tensor | None], base: Tensor | None, out: Tensor) -> Tensor:
        pointers = (ctypes.c_void_p * len(answers))(*(None if one is None else one.data_ptr() for one in answers))
        above, code = None if base is None else base.data_ptr(), TYPES.index(str(out.dtype).removeprefix("torch."))
        native.library().mr_combine(ctypes.addressof(self.d), pointers, above, out.data_ptr(), code)
        return out


def _aligned(nbytes: int) -> Tensor:
    """Zeros at a multiple of 64 bytes, as a page of shared memory is."""
    whole = torch.zeros(nbytes + 64, dtype=torch.uint8)
    begin = -whole.data_ptr() % 64
    return whole[begin : begin + nbytes]


SIZES = [(5, 7), (3, 100), (4, 2048), (1100, 4096), (1100, 4099)]
"""Tokens and elements: less than a register, a rest, whole registers, more than STREAM_BYTES, the same unaligned."""


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "hidden"), SIZES)
def test_rows_arrive_as_they_are_and_those_of_the_own_rank_are_left_out(dtype, tokens, hidden):
    x = torch.randn(tokens, hidden).to(getattr(torch, dtype))
    made = Round(x, 3, own=1)
    assert torch.equal(made.rows(0), x) and torch.equal(made.rows(2), x)
    assert not made.messages[1][: x.nbytes].any()
    assert made.d.rows[:3] == [tokens] * 3 and made.d.pairs[:3] == [tokens] * 3


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("into", ["float32", "same"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "hidden"), SIZES)
def test_sums_are_those_of_float32_rounded_once(dtype, tokens, hidden, into):
    torch.manual_seed(4)
    kind = getattr(torch, dtype)
    made = Round(torch.randn(tokens, hidden).to(kind), 3)
    answers = [torch.randn(tokens, hidden).to(kind) for _ in range(3)]
    answers[2][0, : len(ODD)] = ODD.to(kind)
    for base in (None, torch.randn(tokens, hidden)):
        wanted = torch.zeros(tokens, hidden) if base is None else base.clone()
        wanted += answers[0].float()
        wanted += answers[2].float()
        out = torch.empty(tokens, hidden, dtype=torch.float32 if into == "float32" else kind)
        made.combine([answers[0], None, answers[2]], base, out)
        torch.testing.assert_close(out, wanted.to(out.dtype), rtol=0, atol=0, equal_nan=True)
        if base is not None and out.dtype == torch.float32:
            made.combine([answers[0], None, answers[2]], base, base)
            torch.testing.assert_close(base, out, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_codes_have_a_scale_per_row_and_are_close(codes, dtype):
    torch.manual_seed(5)
    x = (torch.randn(40, 256) * torch.logspace(-3, 3, 40)[:, None]).to(getattr(torch, dtype))
    x[7] = 0
    made = Round(x, 2, codes)
    layout = made.layout
    sent = made.messages[1][: x.numel()].view(x.shape)
    scales = made.messages[1][layout.at_scales :][:160].view(torch.float32)
    most = 127 if codes == "int8" else 448
    largest = x.float().abs().amax(1)
    assert torch.equal(scales, largest / most)
    inverse = torch.where(largest > 0, torch.full_like(largest, most) / largest, 0)  # torch has 1 / x for a number
    scaled = (x.float() * inverse[:, None]).clamp(-most, most)
    if codes == "int8":
        wanted = (scaled + 0.5 * scaled.sign()).trunc().to(torch.int8).view(torch.uint8)
    else:
        wanted = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        zero = wanted & 0x7F == 0  # signs of zeros do not count
        assert torch.equal(sent & 0x7F == 0, zero)
        sent, wanted = sent.masked_fill(zero, 0), wanted.masked_fill(zero, 0)
    assert torch.equal(sent, wanted)
    back = torch.empty_like(x)
    message = made.messages[1].data_ptr()
    kinds = TYPES.index(layout.dtype), layout.coded
    native.library().mr_decode(message, message + layout.at_scales, back.data_ptr(), *x.shape, *kinds)
    error = (back.float() - x.float()).norm(dim=1) / x.float().norm(dim=1).clamp_min(1e-20)
    assert (error < (0.02 if codes == "int8" else 0.04)).all() and not back[7].any()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_rows_with_nan_or_infinity_are_read_as_nan_and_others_are_not(codes, dtype):
    x = torch.randn(8, 100).to(getattr(torch, dtype))
    for row, (at, odd) in enumerate([(0, "nan"), (99, "nan"), (50, "-nan"), (3, "inf"), (64, "-inf")]):
        x[row, at] = float(odd)
    made = Round(x, 1, codes)
    layout, back, message = made.layout, torch.empty_like(x), made.messages[0].data_ptr()
    scales = made.messages[0][layout.at_scales :][:32].view(torch.float32)
    assert scales[:5].isnan().all() and scales[5:].isfinite().all()
    kinds = TYPES.index(layout.dtype), layout.coded
    native.library().mr_decode(message, message + layout.at_scales, back.data_ptr(), *x.shape, *kinds)
    assert back[:5].isnan().all() and back[5:].isfinite().all()


def test_every_code_of_e4m3_is_read_as_torch_reads_it():
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F][None]
    scale, out = torch.ones(1), torch.empty(finite.shape)
    pointers = finite.data_ptr(), scale.data_ptr(), out.data_ptr()
    native.library().mr_decode(*pointers, 1, finite.shape[1], TYPES.index("float32"), FP8)
    assert torch.equal(out, finite.view(torch.float8_e4m3fn).float())


def test_between_two_codes_of_e4m3_the_nearer_one_is_taken():
    """All codes, the middles between them, and what lies next to the middles, with 448 in the row: then x = c."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    up, down = torch.tensor(float("inf")), torch.tensor(0.0)
    values = torch.cat([codes, middle, middle.nextafter(up), middle.nextafter(down)])
    x = torch.cat([values, -values])[None].contiguous()
    made = Round(x, 1, "fp8")
    sent = made.messages[0][: x.numel()]
    wanted = x[0].to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(sent, wanted)
