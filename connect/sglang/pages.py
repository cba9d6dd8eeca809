"""SGLang's pages in the pool: their names, their memory in a host pool, and how much of a prefix is usable. Pure.

A page of a host pool is one value: the concatenation of its pieces, in the order in which the pool gives them. Its name

    sglang/MODEL/RANKS/POOL/GEOMETRY/HASH

has everything that decides about its bytes, so a server of another shape misses and never reads other bytes. HASH is
SGLang's: it is chained over all tokens up to the end of the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from connect.common.raw_memory import Pieces

GEOMETRY = ("page_size", "layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")
"""Attributes of host pools that decide about the bytes of a page. A pool lacks those that do not concern it."""

SHARDED = ("mamba",)
"""Pools that differ from tensor-parallel rank to rank even where the ranks keep the same KV (MLA)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model's KV this process keeps. `splits`: parts of its heads that are values of their own, so that
    servers of another tensor-parallel size find them (SGLang's tp_lcm_size)."""

    root: str
    tp_rank: int
    tp_size: int
    pipeline: str
    replicated: bool
    splits: int = 1

    @classmethod
    def of(cls, config: Any, tag: str = "") -> Shard:
        """From SGLang's HiCacheStorageConfig. `tag`: what the user adds to the root, such as a version of the weights.
        Raises ValueError for a name without a model, which says nothing about the bytes."""
        if not config.model_name:
            raise ValueError("SGLang gave no model name: the pool would mix the pages of different models")
        parts = ["sglang", str(config.model_name).strip("/"), *([str(tag)] if tag else [])]
        pipeline = f"pp{config.pp_rank}of{config.pp_size}-cp{config.attn_cp_rank}of{config.attn_cp_size}"
        splits = config.tp_lcm_size // config.tp_size if config.should_split_heads else 1
        return cls("/".join(parts), config.tp_rank, config.tp_size, pipeline, bool(config.is_mla_model), splits)

    def ranks(self, pool: str) -> list[str]:
        """One for each value that a page of `pool` consists of."""
        if self.replicated and pool not in SHARDED:
            return [f"all-{self.pipeline}"]
        size = self.tp_size * self.splits
        first = self.tp_rank * self.splits
        return [f"tp{rank}of{size}-{self.pipeline}" for rank in range(first, first + self.splits)]


class Pages:
    """The pages of one host pool. `form`: how their bytes are ordered, if not as the pieces of the host pool."""

    def __init__(self, shard: Shard, pool: str, host_pool: Any, form: str = "") -> None:
        self._host_pool = host_pool
        self._splits = shard.splits if len(shard.ranks(pool)) > 1 else 1
        shape = _geometry(host_pool, self._splits) + (f"-{form}" if form else "")
        self._prefixes = [f"{shard.root}/{ranks}/{pool}/{shape}/" for ranks in shard.ranks(pool)]

    @property
    def values(self) -> int:
        """Values per page."""
        return self._splits

    def names(self, keys: Sequence[str]) -> list[str]:
        """Of the values of all pages, page after page."""
        return [prefix + key for key in keys for prefix in self._prefixes]

    def memory(self, indices: Any, pages: int) -> list[Pieces]:
        """Of the values of `pages` pages, whose tokens are at `indices` [pages * page_size] of the host pool. Raises
        ValueError for another number of indices."""
        wanted = pages * (self._host_pool.page_size or 1)
        if indices is None or len(indices) != wanted:
            given = "none" if indices is None else len(indices)
            raise ValueError(f"{pages} pages are {wanted} indices, not {given}")
        if self._splits > 1:
            addresses, sizes = self._host_pool.get_split_heads_page_buffer_meta(indices, self._splits)
        else:
            addresses, sizes = self._host_pool.get_page_buffer_meta(indices)
        each, rest = divmod(len(addresses), pages * self._splits)
        if rest or not each or len(sizes) != len(addresses):
            raise ValueError(f"{len(addresses)} pieces and {len(sizes)} sizes are not {pages} pages")
        rows = [(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        return [Pieces(rows[start : start + each], self._host_pool) for start in range(0, len(rows), each)]

    def whole(self, done: Sequence[bool]) -> list[bool]:
        """Per page whether all of its values are done."""
        return [all(done[start : start + self._splits]) for start in range(0, len(done), self._splits)]


def _geometry(host_pool: Any, splits: int) -> str:
    facts = {name: getattr(host_pool, name, None) for name in GEOMETRY}
    if splits > 1:
        facts["head_num"] = host_pool.head_num // splits
    numbers = [f"{name}{value}" for name, value in facts.items() if isinstance(value, int)]
    dtype = str(getattr(host_pool, "dtype", "bytes")).removeprefix("torch.")
    tags = [str(getattr(host_pool, "layout", "flat")), dtype, *numbers]
    return "-".join([*tags, *([tag] if (tag := getattr(host_pool, "storage_format_tag", None)) else [])])


def leading(done: Sequence[bool]) -> int:
    """Length of the leading run that is done."""
    return list(done).index(False) if False in done else len(done)


def usable(
    pages: int, present: Mapping[str, Sequence[bool]], trailing: Mapping[str, int]
) -> tuple[dict[str, int], list[int]]:
    """(pool -> its longest usable prefix, lengths that all pools can restore) of a prefix of which `pages` pages of KV
    are there. `present`: per further pool whether page i is there. A pool in `trailing` needs only its
    last `trailing[pool]` pages; other pools need all."""
    hits: dict[str, int] = {}
    lengths = range(1, pages + 1)
    restorable = set(lengths)
    for pool, here in present.items():
        if pool in trailing:
            window = max(1, trailing[pool])
            good = {length for length in lengths if all(here[max(0, length - window) : length])}
        else:
            good = set(range(1, leading(here[:pages]) + 1))
        if good:
            hits[pool] = max(good)
        restorable &= good
    return hits, sorted(restorable)
