"""Groups: layers whose KV has one geometry and one rule of what a later request needs.

A model has one group or several. These are the rules, for a prompt of which n tokens are computed:

    kind      its KV                         token n, the next one, needs    a prompt with the same p tokens needs
    full      K and V per head and token     all n tokens                    all p tokens
    latent    one row per token (MLA)        all n tokens                    all p tokens
    window    K and V per head and token     the last W - 1 of them          the last W - 1 of them
    state     a fixed size, whatever n       the state after n tokens        a state saved after p tokens

A token with a window of W sees itself and the W - 1 tokens before it. The KV of `block_size` tokens in all layers of
one group is a block; bytes here are those of whole blocks. A caller that counts tokens passes a block size of 1.

A state cannot be shortened: the pool keeps copies only at some block borders, and a prefix is found up to such a
border. If the pool keeps no windows, a node computes the end of a found prefix again. The KV of the first window layer
is right W - 1 tokens after the start, each further layer W - 1 tokens later, so L window layers need the L (W - 1) last
tokens again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["full", "latent", "window", "state"]


@dataclass(frozen=True, slots=True)
class PoolRule:
    """The parts of a prompt that the pool keeps, apart from full and latent groups, of which it keeps all."""

    windows: bool = True  # blocks of window groups
    state_every: int = 64  # a state after this many blocks of every prompt, and after its last full block

    def __post_init__(self) -> None:
        if self.state_every < 1:
            raise ValueError(f"a state after every {self.state_every} blocks: must be 1 or more")

    def states(self, tokens: int, block_size: int) -> int:
        """The number of states that a prompt of `tokens` tokens leaves in the pool."""
        return -(-(tokens // block_size) // self.state_every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group. A size that its kind does not have is 0. Raises ValueError for any other combination."""

    kind: Kind
    layers: int
    row_bytes: int = 0  # of one token in one layer; not of a state
    window: int = 0  # tokens that a token sees, itself included; only of windows
    state_bytes: int = 0  # of one state in one layer; only of states

    def __post_init__(self) -> None:
        has = (self.row_bytes > 0, self.window > 0, self.state_bytes > 0)
        wanted = (self.kind != "state", self.kind == "window", self.kind == "state")
        if self.layers < 1 or has != wanted or min(self.row_bytes, self.window, self.state_bytes) < 0:
            raise ValueError(f"not a group: {self}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers; 0 for states."""
        return self.layers * self.row_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one state in all layers; 0 for other kinds."""
        return self.layers * self.state_bytes

    @property
    def grows(self) -> bool:
        """Whether each token of a request adds to its KV for good."""
        return self.kind in ("full", "latent")

    def needed(self, tokens: int, block_size: int) -> range:
        """The blocks that the next token after `tokens` tokens needs, by their place in the prompt; none of a state."""
        if self.kind == "state":
            return range(0)
        first = max(0, tokens - self.window + 1) if self.window else 0
        return range(first // block_size, -(-tokens // block_size))

    def held_bytes(self, tokens: int, block_size: int) -> int:
        """Bytes in the arena of a request that has `tokens` tokens. The same bytes move when the request is handed to a
        decode node."""
        return len(self.needed(tokens, block_size)) * block_size * self.token_bytes + self.checkpoint_bytes

    def peak_bytes(self, tokens: int, block_size: int, chunk_tokens: int) -> int:
        """Most bytes in the arena while a prompt is computed in chunks. Of a window: one chunk and what its first token
        needs. Of a state: two, because one is copied to the pool while the next chunk changes the other."""
        if self.kind == "state":
            return 2 * self.checkpoint_bytes
        if self.grows:
            return self.held_bytes(tokens, block_size)
        ends = range(0, tokens, chunk_tokens)
        most = max(
            (-(-min(tokens, at + chunk_tokens) // block_size) - self.needed(at, block_size).start for at in ends),
            default=0,
        )
        return most * block_size * self.token_bytes

    def pooled_bytes(self, tokens: int, block_size: int, rule: PoolRule) -> int:
        """Bytes that a prompt leaves in the pool: its full blocks, or its states."""
        if self.kind == "state":
            return rule.states(tokens, block_size) * self.checkpoint_bytes
        if self.kind == "window" and not rule.windows:
            return 0
        return tokens // block_size * block_size * self.token_bytes

    def fetched_bytes(self, tokens: int, known: int, block_size: int, rule: PoolRule) -> int:
        """Bytes that a node reads from the pool to go on after `tokens` tokens, if it has what token `known` needs."""
        if tokens <= known or (self.kind == "window" and not rule.windows):
            return 0
        blocks = self.needed(tokens, block_size)
        missing = max(0, blocks.stop - max(blocks.start, known // block_size))
        return missing * block_size * self.token_bytes + self.checkpoint_bytes

    def step_bytes(self, tokens: int) -> int:
        """Bytes that move between memory and processor in a decode step of a request that has `tokens` tokens: the
        tokens that the new one sees are read; a state is read and written."""
        seen = min(tokens, self.window) if self.window else tokens
        return seen * self.token_bytes + 2 * self.checkpoint_bytes


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a model, and what its cluster's pool keeps of them."""

    groups: tuple[Group, ...]
    rule: PoolRule = PoolRule()

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("a model without groups")

    @property
    def token_bytes(self) -> int:
        """Bytes that each token adds to a request for good."""
        return sum(group.token_bytes for group in self.groups if group.grows)

    @property
    def fixed_bytes(self) -> int:
        """Most bytes of a request that do not grow with it: full windows and states."""
        return sum(group.held_bytes(group.window, 1) for group in self.groups if not group.grows)

    @property
    def depth(self) -> int:
        """Tokens before a border that are computed again to fill the windows, if the pool keeps none."""
        return 0 if self.rule.windows else sum(g.layers * (g.window - 1) for g in self.groups if g.kind == "window")

    @property
    def has_states(self) -> bool:
        return any(group.kind == "state" for group in self.groups)

    def held_bytes(self, tokens: int, block_size: int) -> int:
        return sum(group.held_bytes(tokens, block_size) for group in self.groups)

    def fetched_bytes(self, tokens: int, known: int, block_size: int) -> int:
        return sum(group.fetched_bytes(tokens, known, block_size, self.rule) for group in self.groups)

    def block_bytes(self, block_size: int) -> float:
        """Mean bytes of a block in the pool, in a prompt of many: a state is shared by the blocks between two."""
        blocks = self.rule.state_every
        return sum(g.pooled_bytes(blocks * block_size, block_size, self.rule) for g in self.groups) / blocks

    def border(self, found: int, block_size: int) -> int:
        """The tokens that a prompt need not compute, if its first `found` tokens are in the pool: up to the last block
        border at which every group can go on. Of states, those after every `state_every`-th block count; those after
        the ends of prompts depend on which prompts came before."""
        step = block_size * (self.rule.state_every if self.has_states else 1)
        return max(0, found - self.depth) // step * step
