"""The gated delta rule over states in a paged pool: who computes it, and what every implementation is given.

A backend may have a rule of its own: a method `delta_rule`, without arguments, which returns a Rule. Any other backend
gets TorchRule, which copies the states out of the pool, computes with attention/delta_rule.py, and copies them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attention import delta_rule
from attention.interface import AttentionBackend
from attention.states import Place


@dataclass(frozen=True, slots=True)
class Tokens:
    """The inputs of T tokens, as attention/delta_rule.py has them."""

    q: Tensor  # [T, key_heads, key_size] of any float type, heads side by side
    k: Tensor
    v: Tensor  # [T, value_heads, value_size]
    decay: Tensor  # [T, value_heads] or [T, value_heads, key_size]
    rate: Tensor  # [T, value_heads]

    def part(self, first: int, last: int) -> Tokens:
        """The tokens first .. last - 1."""
        return Tokens(*(x[first:last] for x in (self.q, self.k, self.v, self.decay, self.rate)))

    @property
    def matrix(self) -> tuple[int, int, int]:
        """The shape of a state: value_heads, key_size, value_size."""
        return self.v.shape[1], self.k.shape[2], self.v.shape[2]


class Rule(Protocol):
    """Reads the states of a layer in the pool, and writes those after the tokens.

    place: where the matrices of a layer lie, [value_heads, key_size, value_size] float32 of each request. read, write
    [N, G] int64: their blocks before and after the tokens, which may be the same; those that different requests write
    differ, and nobody else reads them in this call. fresh [N] bool: requests that begin with zeros; None = none does.
    out [T, value_heads, value_size], dense, of the type of q."""

    name: str

    def step(self, tokens: Tokens, place: Place, read: Tensor, fresh: Tensor, write: Tensor, out: Tensor) -> None:
        """One token of each of N requests."""

    def chunk(
        self, tokens: Tokens, place: Place, read: Tensor, fresh: Tensor | None, write: Tensor, out: Tensor
    ) -> None:
        """All tokens of one request, N = 1."""


class TorchRule:
    """On any device."""

    name = "torch"

    def step(self, tokens: Tokens, place: Place, read: Tensor, fresh: Tensor, write: Tensor, out: Tensor) -> None:
        states = _begun(tokens, place, read, fresh)
        out.copy_(delta_rule.step(tokens.q, tokens.k, tokens.v, tokens.decay, tokens.rate, states))
        place.write(write, states.flatten(1))

    def chunk(
        self, tokens: Tokens, place: Place, read: Tensor, fresh: Tensor | None, write: Tensor, out: Tensor
    ) -> None:
        (state,) = _begun(tokens, place, read, fresh)
        found, after = delta_rule.chunk(tokens.q, tokens.k, tokens.v, tokens.decay, tokens.rate, state)
        out.copy_(found)
        place.write(write, after.reshape(1, -1))


def _begun(tokens: Tokens, place: Place, read: Tensor, fresh: Tensor | None) -> Tensor:
    """[N, *Tokens.matrix], a copy."""
    states = place.read(read)
    if fresh is not None:
        states = states.masked_fill(fresh[:, None], 0)
    begun: Tensor = states.unflatten(1, tokens.matrix)
    return begun


def rule_of(backend: AttentionBackend) -> Rule:
    """The backend's own rule, or TorchRule."""
    own = getattr(backend, "delta_rule", None)
    if own is None:
        return TorchRule()
    rule: Rule = own()
    return rule


def check(tokens: Tokens, place: Place, read: Tensor, write: Tensor, out: Tensor) -> None:
    """For rules that take addresses: raises ValueError for arguments that do not fit together."""
    heads, key_size, value_size = tokens.matrix
    rows, key_heads = len(tokens.v), tokens.k.shape[1]
    gates = (rows, heads), (rows, heads, key_size)
    shapes = (tokens.q.shape, tokens.k.shape, out.shape, tokens.rate.shape)
    wanted = ((rows, key_heads, key_size), (rows, key_heads, key_size), (rows, heads, value_size), gates[0])
    if shapes != wanted or tuple(tokens.decay.shape) not in gates or heads % key_heads or not out.is_contiguous():
        raise ValueError(f"the delta rule has tokens of {shapes} and decays {tuple(tokens.decay.shape)}, not {wanted}")
    if len({x.dtype for x in (tokens.q, tokens.k, tokens.v, out)}) > 1:
        raise ValueError("q, k, v and the output of the delta rule must have one type")
    if place.elements != heads * key_size * value_size or place.memory.stride(1) != 1:
        raise ValueError(f"a place of {place.elements} elements is not one of states {tokens.matrix}")
    if read.shape != write.shape or read.dim() != 2:
        raise ValueError(f"blocks that are read {tuple(read.shape)} and written {tuple(write.shape)} differ in shape")
