"""Whether and how far a node takes requests whose KV exceeds its arena, and whether it lends room to them. Pure.

--beyond-memory and --attention-elsewhere.
"""

from __future__ import annotations

from cache.block import BlockGeometry
from cache.layer_groups import STATE
from cache.tiers.lodging import most_lodged
from engine.config.config import Config
from engine.config.flags import UsageError
from sched.beyond import Room, room_of

ON = "--beyond-memory on"

SSD_FILL, SSD_EXTRA_BYTES = 75, 8192
"""Per cent of the SSD's bytes that blocks fill, and bytes that each takes in addition (cache/ssd/lmdb_medium.py)."""


def beyond_room(config: Config, geometry: BlockGeometry) -> Room | None:
    """What one such request gets on a node with this resolved config; None if the node takes none. Raises UsageError if
    it cannot, and the message names the flag to change."""
    if config.beyond_memory == "off" or "decode" not in config.roles:
        return None
    states = geometry.groups is not None and STATE in geometry.groups.windows
    for found, what, remedy in (
        (config.device != "cpu", f"--device {config.device}", "only a CPU reads cold blocks into its arena"),
        (geometry.encoded, f"--pool-dtype {config.pool_dtype}", "the tier must keep blocks as the arena does"),
        (geometry.kind != "full", "a model with a latent", "its rows have no attention in parts"),
        (states, "a model with states", "a tier keeps blocks of tokens alone"),
    ):
        if found:
            raise UsageError(f"{ON} does not work with {what} ({remedy}); leave one of the two out")
    slots = config.dram_bytes // geometry.pool_bytes
    if most_lodged(slots) < 1:
        raise UsageError(
            f"{ON} keeps older blocks in the DRAM share of this node, and --dram-bytes {config.dram_bytes} has room "
            f"for {slots} blocks of {geometry.pool_bytes} bytes; give more"
        )
    blocks, tiers = config.kv_cache_bytes // geometry.block_bytes, (most_lodged(slots), _on_ssd(config, geometry))
    room = room_of(blocks, tiers, geometry.block_size, geometry.block_bytes, config.max_num_batched_tokens)
    if room is None:
        raise UsageError(
            f"{ON}: an arena of {blocks} blocks is too small to read others into it; give --kv-cache-bytes "
            f"{8 * geometry.block_bytes} or more"
        )
    return room


def lends(config: Config, geometry: BlockGeometry) -> bool:
    """Whether a node with this resolved config holds blocks of other nodes' requests and attends to them, and lets
    others do so for its own. Raises UsageError if its blocks cannot be attended to in parts."""
    given = config.attention_elsewhere
    if given == "off":
        return False
    for found, what, remedy in (
        (geometry.encoded, f"--pool-dtype {config.pool_dtype}", "a holder attends to blocks of the pool as they are"),
        (geometry.kind != "full", "a model with a latent", "its rows have no attention in parts"),
        (geometry.groups is not None, "--kv-groups windows", "its old KV leaves the arena anyway"),
    ):
        if found:
            raise UsageError(
                f"--attention-elsewhere {given} does not work with {what} ({remedy}); leave one of the two out"
            )
    return most_lodged(config.dram_bytes // geometry.pool_bytes) > 0


def _on_ssd(config: Config, geometry: BlockGeometry) -> int:
    """Blocks of one such request on the SSD tier; a little less than either kind of tier has."""
    if config.ssd_path is None or not config.enable_prefix_caching:  # a block on SSD is found by its key
        return 0
    return most_lodged(SSD_FILL * config.ssd_bytes // 100 // (geometry.pool_bytes + SSD_EXTRA_BYTES))
