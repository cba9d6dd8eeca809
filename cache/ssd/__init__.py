"""The SSD tier: blocks on disk under a byte budget, found again after a restart.

Files:
    claim        One process's exclusive hold on the directory of an SSD tier, with the state that the previous owner
                 left
    direct       Reads and writes past the page cache
    health       Tracks the running operations of a tier's disk and its failures
    index        SsdIndex: the blocks on disk, in memory: the place, checksum and facts of each, and which leave next
    lmdb_medium  Blocks in one LMDB file of fixed size
    lmdb_pages   Reads LMDB's file page by page without LMDB: the content of its trees, and whether LMDB can open it
                 safely
    medium       The interface of an SSD tier's storage
    note         20 bytes stored with a block's content: facts for the policies, and whether the block is kept
    place        The directory of an SSD tier: its owner, its allowed files, and those that are dropped or refused
    slot_medium  Blocks in one preallocated file of equal slots, written and read past the page cache
    tier         SsdTier: writes and reads blocks on disk, and handles the failures of the disk
"""

from __future__ import annotations

from cache.ssd.claim import SsdError
from cache.ssd.medium import New
from cache.ssd.tier import SsdTier, backends

__all__ = ["New", "SsdError", "SsdTier", "backends"]
