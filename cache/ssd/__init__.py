"""The SSD tier: blocks on disk under a byte budget, found again after a restart.

tier.py          SsdTier: which blocks are here, who goes next, checksums, syncs, what to do when the disk fails
health.py        what the disk is doing, since when, and what it fails at
note.py          the data stored with a block in addition to its bytes
medium.py        what a tier asks of what it is kept in
lmdb_medium.py   one LMDB file (--ssd-backend lmdb, the default)
lmdb_pages.py    that file read page by page without LMDB: whether LMDB can be let near it
slot_medium.py   one preallocated file of slots, past the page cache (--ssd-backend file)
place.py         the directory: whose it is, which files may be there, what is dropped or refused
claim.py         one process's hold on it
direct.py        reads and writes past the page cache

Files:
    claim        One process's hold on the directory of an SSD tier, and what it knows of the owner before
    direct       Reads and writes past the page cache
    health       What the disk of a tier is doing, since when, and what it fails at
    lmdb_medium  Blocks in one LMDB file of fixed size
    lmdb_pages   LMDB's file read page by page, without LMDB: what its trees hold
    medium       What an SSD tier asks of what its blocks are kept in: the tier keeps the books
    note         Twenty bytes stored with a block next to its content: facts for the policies
    place        The directory of an SSD tier: whose it is, which files may be there
    slot_medium  Blocks in one preallocated file of equal slots, written and read past the page cache
    tier         SsdTier: which blocks are on disk, who goes next
"""

from __future__ import annotations

from cache.ssd.claim import SsdError
from cache.ssd.medium import New
from cache.ssd.tier import SsdTier, backends

__all__ = ["New", "SsdError", "SsdTier", "backends"]
