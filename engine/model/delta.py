"""A layer with a gated delta rule instead of attention (arXiv 2412.06464): its past is a state.

    [q | k | v | z | b | a] = x W          z, as long as v, gates the output; b and a are one number per value head
    q, k, v <- silu( conv( q, k, v ) )     causal, a kernel for each channel over the last `kernel` tokens
    g = -e^A softplus(a + dt)              the decay, of each value head          rate = sigmoid(b)
    o = rule( q, k, v, g, rate )           attention/delta_rule.py, on states in the pool: attention/delta_states.py
    out = W_o ( norm(o) silu(z) )          the norm over a head's values

This is Qwen3-Next. Kimi Linear (arXiv 2510.26692) has a decay for each channel of a key, and makes both gates by two
matrices with a narrow middle:

    [q | k | v | b | f | h] = x W          a = f F, of each key channel           z = h G
    out = W_o ( norm(o) sigmoid(z) )       the norm in float32

The state of a request is the rule's matrix [value_heads, key_size, value_size] in float32 and the last kernel - 1
inputs of the convolution in the pool's type. It lies in blocks of the KV pool (attention/states.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.delta_states import Rule, Tokens
from attention.states import Place, StateBatch, StateSlots
from cache.layer_groups import state_pieces
from engine.model.delta_config import STATE_ITEM, Delta
from engine.model.ops.interface import Linear, Ops


@dataclass(frozen=True, slots=True)
class NarrowGates:
    """The second matrices of Kimi Linear's gates."""

    decay: Linear  # F [keys, key_size]
    output: Linear  # G [values, value_size]


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """One layer between its first product and its last, o."""

    sizes: Delta
    number: int  # among the layers with a state
    conv: Tensor  # [channels, kernel]
    log_decay: Tensor  # [value_heads] float32: A
    dt: Tensor  # [value_heads] or [keys] float32
    norm: Tensor  # [value_size]
    eps: float
    ops: Ops
    rule: Rule
    narrow: NarrowGates | None = None

    def __call__(self, projected: Tensor, memory: Tensor, kv_dtype: torch.dtype, states: StateBatch) -> Tensor:
        """projected [T, columns of the first product] -> [T, values]; reads and writes states in `memory`
        [num_blocks, elements] float32 (attention/states.py). kv_dtype: of the pool."""
        sizes, heads = self.sizes, self.sizes.value_heads
        mixed, z, decay, rate = self._gates(projected)
        matrices, inputs = self._places(memory, kv_dtype)
        past = self._unpacked(inputs.read(states.read).masked_fill(states.fresh[:, None], 0), kv_dtype, projected.dtype)
        out = projected.new_empty(len(projected), heads, sizes.value_size)
        row = len(states.decodes)
        if row:
            window = torch.cat((past[:row], mixed[:row, None]), 1)  # [D, kernel, channels]
            tokens = Tokens(*self._heads(self._convolved(window)[:, 0]), decay[:row], rate[:row])
            self.rule.step(tokens, matrices, states.read[:row], states.fresh[:row], states.decodes, out[:row])
            inputs.write(states.decodes, self._packed(window[:, 1:], kv_dtype))
        for request, ends in enumerate(states.chunks, row):
            drafts = states.drafts[request - len(states.decodes)] if states.drafts else 0
            last = row + ends[-1][0] + drafts
            window = torch.cat((past[request], mixed[row:last]))  # [kernel - 1 + tokens, channels]
            tokens = Tokens(*self._heads(self._convolved(window[None])[0]), decay[row:last], rate[row:last])
            of_chunk, begin = out[row:last], 0
            read = states.read[request : request + 1]
            fresh: Tensor | None = states.fresh[request : request + 1]
            for end, blocks in ends:
                write = blocks[None]
                self.rule.chunk(tokens.part(begin, end), matrices, read, fresh, write, of_chunk[begin:end])
                inputs.write(write, self._packed(window[None, end : end + sizes.kernel - 1], kv_dtype))
                begin, read, fresh = end, write, None
            if drafts:
                only = read.new_zeros(1, 1)
                tail, rest = tokens.part(begin, begin + drafts), of_chunk[begin:]
                self.rule.chunk(tail, matrices.apart(read), only, None, only, rest)
            row = last
        gate = z.reshape(out.shape).float()
        if self.narrow is None:
            out = self.ops.rms_norm(out, self.norm, self.eps) * F.silu(gate)
        else:
            out = self.ops.rms_norm(out.float(), self.norm.float(), self.eps) * gate.sigmoid()
        return out.to(projected.dtype).flatten(1)

    def _gates(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The convolution's inputs [T, channels], z [T, values], and decay and rate as attention/delta_rule.py has
        them."""
        sizes, heads, strength = self.sizes, self.sizes.value_heads, -self.log_decay.exp()
        if self.narrow is None:
            mixed, z, b, a = projected.split((sizes.channels, sizes.values, heads, heads), 1)
            return mixed, z, strength * F.softplus(a.float() + self.dt), b.sigmoid()
        mixed, b, f, h = projected.split((sizes.channels, heads, sizes.key_size, sizes.value_size), 1)
        a = F.softplus(self.narrow.decay(f).float() + self.dt).unflatten(1, (heads, sizes.key_size))
        return mixed, self.narrow.output(h), strength[:, None] * a, b.sigmoid()

    def _convolved(self, window: Tensor) -> Tensor:
        """[N, kernel - 1 + T, channels] -> [N, T, channels]; products and sums in float32."""
        kernel = self.sizes.kernel
        tokens = window.shape[1] - kernel + 1
        total = window[:, :tokens].float() * self.conv[:, 0]
        for tap in range(1, kernel):
            total = torch.addcmul(total, window[:, tap : tap + tokens].float(), self.conv[:, tap].float())
        return F.silu(total.to(window.dtype))

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, channels] -> q, k [N, key_heads, key_size] and v [N, value_heads, value_size]."""
        sizes = self.sizes
        q, k, v = mixed.split((sizes.keys, sizes.keys, sizes.values), 1)
        shape = (sizes.key_heads, sizes.key_size)
        return q.unflatten(1, shape), k.unflatten(1, shape), v.unflatten(1, (sizes.value_heads, sizes.value_size))

    def _places(self, memory: Tensor, kv_dtype: torch.dtype) -> tuple[Place, Place]:
        """Of the rule's matrices and of the convolution's inputs."""
        state_bytes, elements = self.sizes.state_bytes(kv_dtype.itemsize), memory.shape[1]
        matrices, inputs = slots_of(self.number, state_bytes, self.sizes.matrix, elements)
        return Place(memory, matrices), Place(memory, inputs)

    def _unpacked(self, states: Tensor, kv_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
        """[N, elements] float32 -> the convolution's inputs [N, kernel - 1, channels] of `dtype`."""
        sizes = self.sizes
        inputs = states.contiguous().view(kv_dtype)[:, : (sizes.kernel - 1) * sizes.channels]
        past: Tensor = inputs.unflatten(1, (sizes.kernel - 1, sizes.channels)).to(dtype)
        return past

    def _packed(self, inputs: Tensor, kv_dtype: torch.dtype) -> Tensor:
        """The inverse of _unpacked."""
        row = inputs.to(kv_dtype).flatten(1)
        row = F.pad(row, (0, -row.shape[1] % (STATE_ITEM // kv_dtype.itemsize)))
        return row.contiguous().view(torch.float32)


@lru_cache(maxsize=256)
def slots_of(number: int, state_bytes: int, matrix: int, elements: int) -> tuple[StateSlots, StateSlots]:
    """Of the number-th layer with a state, in blocks of `elements` float32: of its matrix, and of what follows it."""
    found = state_pieces(number, state_bytes, elements * STATE_ITEM)
    whole = StateSlots(
        tuple((part, offset // STATE_ITEM, (offset + nbytes) // STATE_ITEM) for part, offset, nbytes in found)
    )
    return whole.between(0, matrix), whole.between(matrix, whole.elements)
