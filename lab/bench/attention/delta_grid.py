"""The reference grid of the gated delta rule: random steps over states in a pool, on which every rule must be correct.

The rule of lab/bench/attention/grid.py, for the outputs and for the states after the tokens: no further from the
definition in float64 than twice what plain torch is in the type of the tokens. States lie in several pieces, whose
borders cut heads and rows. All memory next to them is NaN, and must stay so. States that are read elsewhere than they
are written must stay too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from zlib import crc32

import torch
from torch import Tensor

from attention.delta_rule import EPS
from attention.delta_states import Rule, Tokens, TorchRule
from attention.states import Place, StateSlots
from lab.bench.attention.grid import DTYPES, SLACK

Mix = list[tuple[int, bool]]
"""(tokens, begins with zeros) of each request; requests of one token first."""

MIXES: dict[str, Mix] = {
    "one decode": [(1, False)],
    "decodes": [(1, False), (1, True), (1, False), (1, False), (1, True)],
    "short chunks": [(2, True), (3, False), (15, False)],
    "chunks": [(16, False), (17, True), (64, False)],
    "everything": [(1, False), (1, True), (40, False), (130, True)],
}
HEADS = ((1, 1, 16, 48), (2, 4, 64, 32), (2, 6, 24, 40), (2, 2, 128, 128), (1, 3, 12, 20))
"""(key heads, value heads, key size, value size); the last sizes are no whole vectors."""
DECAYS = (0.0, 0.05, 3.0, 40.0)
"""Means of -g."""
PARTS = 2
"""Blocks of a request."""


@dataclass(frozen=True, slots=True)
class Point:
    """One step of the grid."""

    mix: str
    heads: tuple[int, int, int, int]
    decay: float
    by_channel: bool
    dtype: torch.dtype
    moves: bool = True  # states are written to other blocks than they are read from

    def __str__(self) -> str:
        gates = "channel" if self.by_channel else "head"
        kind, moved = str(self.dtype).removeprefix("torch."), "other blocks" if self.moves else "in place"
        key_heads, value_heads, key_size, value_size = self.heads
        heads = f"{value_heads} values of {value_size} on {key_heads} keys of {key_size}"
        return f"delta rule, {self.mix}, {heads}, a decay of {self.decay:g} for each {gates}, {kind}, {moved}"


def points(quick: bool = False) -> Iterator[Point]:
    """Every mix with both kinds of decay, all heads and all types, with the decays in turn; `quick`: a seventh of them,
    which has all of these too."""
    axes = list(product(MIXES, (False, True), HEADS, DTYPES))
    for i, (mix, by_channel, heads, dtype) in enumerate(axes):
        if not quick or i % 7 == 0:
            yield Point(mix, heads, DECAYS[i % len(DECAYS)], by_channel, dtype, moves=i % 2 == 0)


class Case:
    """A random step: the inputs of each request, and a pool with its states."""

    def __init__(self, point: Point, device: str = "cpu") -> None:
        self.random = torch.Generator().manual_seed(crc32(str(point).encode()))
        self.point, self.device, mix = point, device, MIXES[point.mix]
        _, value_heads, key_size, value_size = point.heads
        self.matrix = value_heads, key_size, value_size
        size = value_heads * key_size * value_size
        first = size // 2 + value_size // 3  # inside a row
        block = first + 5
        self.slots = StateSlots(((1, 5, 5 + first), (0, 3, 3 + size - first)))
        order = torch.randperm(2 * PARTS * len(mix) + 1, generator=self.random)[1:].view(2, len(mix), PARTS)
        self.read, self.write = order[0], order[1] if point.moves else order[0].clone()
        self.fresh = torch.tensor([begins for _, begins in mix])
        self.memory = torch.full((2 * PARTS * len(mix) + 1, block), torch.nan)
        self.states = self._normal(len(mix), size)
        held = ~self.fresh
        self.slots.write(self.memory, self.read[held], self.states[held])
        self.states[self.fresh] = 0
        self.tokens = [self.tokens_of(count) for count, _ in mix]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def tokens_of(self, count: int) -> Tokens:
        """As the engine has them: q, k and v are parts of one row."""
        key_heads, value_heads, key_size, value_size = self.point.heads
        keys, values = key_heads * key_size, value_heads * value_size
        q, k, v = self._normal(count, 2 * keys + values).to(self.point.dtype).split((keys, keys, values), 1)
        gates = (count, value_heads, key_size) if self.point.by_channel else (count, value_heads)
        return Tokens(
            q.unflatten(1, (key_heads, key_size)),
            k.unflatten(1, (key_heads, key_size)),
            v.unflatten(1, (value_heads, value_size)),
            -2 * self.point.decay * torch.rand(gates, generator=self.random),
            self._normal(count, value_heads).sigmoid().to(self.point.dtype),
        )

    def run(self, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
        """(outputs [T, value_heads, value_size], states after them [N, *matrix], the memory)."""
        moved = self.memory.to(self.device, copy=True)
        place = Place(moved, self.slots)
        read, write, fresh = (x.to(self.device) for x in (self.read, self.write, self.fresh))
        decodes = sum(len(tokens.v) == 1 for tokens in self.tokens)
        outs = []
        if decodes:
            together = joined(self.tokens[:decodes], self.device)
            outs.append(out_of(together))
            rule.step(together, place, read[:decodes], fresh[:decodes], write[:decodes], outs[-1])
        for i, tokens in enumerate(self.tokens[decodes:], decodes):
            alone = joined([tokens], self.device)
            outs.append(out_of(alone))
            begins = fresh[i : i + 1] if self.fresh[i] else None
            rule.chunk(alone, place, read[i : i + 1], begins, write[i : i + 1], outs[-1])
        after = place.read(write).unflatten(1, self.matrix)
        return torch.cat(outs).cpu(), after.cpu(), moved.cpu()


def joined(parts: list[Tokens], device: str) -> Tokens:
    """The tokens of several requests, q, k and v in one row still."""
    q, k, v = ([getattr(part, name) for part in parts] for name in ("q", "k", "v"))
    rows = torch.cat([torch.cat([x.flatten(1) for x in each], 1) for each in zip(q, k, v, strict=True)]).to(device)
    sizes = [x[0].shape[1] * x[0].shape[2] for x in (q, k, v)]
    of_q, of_k, of_v = (
        x.unflatten(1, like[0].shape[1:]) for x, like in zip(rows.split(sizes, 1), (q, k, v), strict=True)
    )
    decay, rate = (torch.cat([getattr(part, name) for part in parts]).to(device) for name in ("decay", "rate"))
    return Tokens(of_q, of_k, of_v, decay, rate)


def out_of(tokens: Tokens) -> Tensor:
    return torch.full(tokens.v.shape, torch.nan, dtype=tokens.v.dtype, device=tokens.v.device)


def defined(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token after another, as the paper has it, in float64."""
    q, k, v, decay, rate = (x.double() for x in (tokens.q, tokens.k, tokens.v, tokens.decay, tokens.rate))
    each, out, state = v.shape[1] // k.shape[1], torch.empty_like(v), state.double()
    q, k = ((x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()).repeat_interleave(each, 1) for x in (q, k))
    decay = decay if decay.dim() == 3 else decay[..., None]
    for t in range(len(v)):
        state = decay[t].exp()[..., None] * state
        wrong = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], rate[t][:, None] * wrong)
        out[t] = torch.einsum("hkv,hk->hv", state, q[t]) / k.shape[2] ** 0.5
    return out, state


def find_delta_fault(rule: Rule, point: Point, device: str = "cpu") -> str | None:
    """The fault at this point, in one line; None = correct."""
    case = Case(point, device)
    found = [
        defined(tokens, state.unflatten(0, case.matrix)) for tokens, state in zip(case.tokens, case.states, strict=True)
    ]
    truth = torch.cat([out for out, _ in found]), torch.stack([state for _, state in found])
    plain, (*ours, memory) = case.run(TorchRule()), case.run(rule)
    for what, exact, of_torch, own in zip(("outputs", "states"), truth, plain, ours, strict=False):
        if not own.isfinite().all():
            return f"{what} have NaN or infinity: a read of something else than the state or the tokens"
        allowed = 2 * float((of_torch.double() - exact).abs().max()) + SLACK
        error = float((own.double() - exact).abs().max())
        if error > allowed:
            return f"{what} are off by {error:.2e}; allowed is {allowed:.2e}, twice as much as plain torch is off"
    case.slots.write(memory, case.write, torch.full((len(case.write), case.slots.elements), torch.nan))
    before = case.memory.clone()
    case.slots.write(before, case.write, torch.full((len(case.write), case.slots.elements), torch.nan))
    if not torch.equal(memory.nan_to_num(7.0), before.nan_to_num(7.0)):
        return "memory next to the states that are written has changed"
    return None
