"""LMDB's file read without LMDB: it agrees with LMDB on whole files and refuses damaged ones before LMDB meets them."""

import os
import random
import subprocess
import sys
from pathlib import Path

import lmdb
import lmdb.verify
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.arena import checksum
from cache.ssd import SsdTier
from cache.ssd.direct import PAGE
from cache.ssd.lmdb_pages import HEADER, LEAF, Pages, Run
from cache.ssd.medium import Damaged

PROJECT = Path(__file__).parents[3]
ROOT = b"r" * 16


def key_of(i: int) -> bytes:
    return random.Random(i).randbytes(16)  # in no order: pages split and merge everywhere


def rows_of(path: Path) -> dict[str, list]:
    """Both databases by our reader. Raises Damaged."""
    fd = os.open(path, os.O_RDONLY)
    try:
        pages = Pages(fd)
        found = {name: pages.database(name) for name in ("blocks", "index")}
        pages.finish()
    finally:
        os.close(fd)
    return found


def churn(directory: Path, slot_bytes: int, map_bytes: int, writes: int, seed: int) -> SsdTier:
    """A tier after many writes, evictions and deletes, open."""
    rng = random.Random(seed)
    tier = SsdTier(directory, slot_bytes, map_bytes, ROOT)
    for i in range(writes):
        data = rng.randbytes(8) * (slot_bytes // 8 if rng.random() < 0.8 else 1)
        assert tier.put(key_of(i), data, checksum(data))
        if rng.random() < 0.3:
            tier.delete(key_of(rng.randrange(i + 1)))
    return tier


@settings(max_examples=8, deadline=None)
@given(st.integers(64, 9000), st.integers(0, 2**32), st.integers(1, 600))
def test_it_reads_what_lmdb_reads(tmp_path_factory, slot_bytes, seed, writes):
    directory = tmp_path_factory.mktemp("churn") / "ssd"
    churn(directory, slot_bytes, 2 << 20, writes, seed).close()
    found = rows_of(directory / "data.mdb")
    assert lmdb.verify.verify(str(directory)) == []
    with lmdb.open(str(directory), max_dbs=2, readonly=True) as env, env.begin() as txn:
        for name, rows in found.items():
            theirs = list(txn.cursor(db=env.open_db(name.encode(), txn=txn, create=False)))
            assert [key for key, _, _ in rows] == [key for key, _ in theirs]
            content = (directory / "data.mdb").read_bytes()
            for (_, ours, _), (_, value) in zip(rows, theirs, strict=True):
                assert (content[ours.offset : ours.offset + ours.nbytes] if isinstance(ours, Run) else ours) == value


def test_a_deep_tree(tmp_path):
    """Three levels of branches and leaves, lists of free pages that take pages of their own."""
    tier = churn(tmp_path / "ssd", 64, 48 << 20, 12_000, 1)
    stats = tier.stats()
    tier.close()
    found = rows_of(tmp_path / "ssd" / "data.mdb")
    assert len(found["blocks"]) == len(found["index"]) == stats["blocks"] > 5000
    assert stats["failures"] == 0


def tree_pages(path: Path) -> list[int]:
    """Pages of the trees and meta pages, in use or not any more."""
    content = path.read_bytes()
    numbers = range(2, len(content) // PAGE)
    return [0, 1] + [n for n in numbers if HEADER.unpack_from(content, n * PAGE)[2] in (1, LEAF)]


AFTER = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.cache.ssd.test_lmdb_pages import life
life(sys.argv[2], int(sys.argv[3]))
"""


def life(directory: str, seed: int) -> None:
    """What a node does with a tier that it finds: read everything, then write and delete until all pages have turned
    over. Wrong bytes are an assertion."""
    tier = SsdTier(directory, 5000, 1 << 20, ROOT)
    into = bytearray(5000)
    for key in tier.all_keys():
        found = tier.get(key, into)
        assert found is None or found.checksum == checksum(into[: found.length])
    rng = random.Random(seed)
    for i in range(400):
        data = rng.randbytes(5000)
        tier.put(rng.randbytes(16), data, checksum(data))
        if i % 3 == 0:
            tier.delete(rng.choice(tier.all_keys()))
    assert tier.stats()["blocks"] > tier.capacity // 2
    assert tier.stats()["failures"] == 0
    tier.close()


def test_no_bit_of_the_trees_ends_a_process(tmp_path):
    """Single bits, and bursts of them, in pages of the trees, which is where LMDB would crash: the process that opens
    the tier lives on and serves. What our reader lets pass, the one that comes with LMDB's binding does, too, but for
    the headers of values, which are looked at later."""
    directory = tmp_path / "ssd"
    churn(directory, 5000, 1 << 20, 300, 2).close()
    path = directory / "data.mdb"
    whole = path.read_bytes()
    pages, seed = tree_pages(path), random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    refused, passed = 0, []
    for _ in range(400):
        damaged = bytearray(whole)
        page = rng.choice(pages)
        for _ in range(rng.choice((1, 1, 1, 8))):
            at = rng.randrange(64 if rng.random() < 0.5 else PAGE)
            damaged[page * PAGE + at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            rows_of(path)
        except Damaged:
            refused += 1
            continue
        try:
            theirs = lmdb.verify.verify(str(directory))
        except lmdb.verify.VerifyError as error:
            theirs = [str(error)]
        assert all("overflow" in problem or "leak" in problem for problem in theirs), f"seed {seed}: {theirs}"
        passed.append(bytes(damaged))
    assert refused > 20, f"seed {seed}"  # about 55, with a standard deviation of 6
    for damaged in rng.sample(passed, min(4, len(passed))):
        path.write_bytes(damaged)
        done = subprocess.run(
            [sys.executable, "-c", AFTER, str(PROJECT), str(directory), str(seed)], capture_output=True, text=True
        )
        assert done.returncode == 0, f"seed {seed}: {done.returncode} {done.stderr}"


def test_a_value_with_a_damaged_header_is_not_given_back_to_lmdb(tmp_path, caplog):
    """Its page count says how many pages LMDB would free. The tier starts empty instead, and serves on."""
    tier = churn(tmp_path / "ssd", 5000, 1 << 20, 50, 3)
    path = tmp_path / "ssd" / "data.mdb"
    key = tier.all_keys()[0]
    page = tier._index.entries[key].place // PAGE
    with path.open("r+b") as file:
        file.seek(page * PAGE + 12)
        file.write(b"\x63")
    assert tier.delete(key)
    assert "does not begin a value" in caplog.text
    assert tier.stats()["blocks"] == 0
    data = bytes(5000)
    assert tier.put(b"k" * 16, data, checksum(data))
    assert tier.get(b"k" * 16, bytearray(5000))[1:3] == (checksum(data), 5000)
    assert tier.stats()["renewals"] == 1
    tier.close()


@pytest.mark.parametrize("content", [b"", b"\xee" * 2 * PAGE, b"\0" * 64 * PAGE])
def test_no_database_at_all_is_started_empty(tmp_path, caplog, content):
    directory = tmp_path / "ssd"
    churn(directory, 5000, 1 << 20, 5, 4).close()
    (directory / "data.mdb").write_bytes(content)
    tier = SsdTier(directory, 5000, 1 << 20, ROOT)
    assert "starting with an empty tier" in caplog.text
    assert tier.stats()["blocks"] == 0
    data = bytes(5000)
    assert tier.put(b"k" * 16, data, checksum(data))
    tier.close()


def test_a_process_that_dies_while_it_opens_costs_one_start(tmp_path, caplog):
    directory = tmp_path / "ssd"
    churn(directory, 5000, 1 << 20, 5, 5).close()
    die = "import os; from cache.ssd.place import Place; Place.opened = lambda place: os.abort()"
    start = f"{die}\nfrom cache.ssd import SsdTier\nSsdTier({str(directory)!r}, 5000, 1 << 20, {ROOT!r})"
    assert subprocess.run([sys.executable, "-c", start], cwd=PROJECT, capture_output=True).returncode < 0
    tier = SsdTier(directory, 5000, 1 << 20, ROOT)
    assert "1 processes died while opening it" in caplog.text
    assert tier.stats()["blocks"] == 0
    tier.close()
