"""The file of layers: what is written comes back, past the page cache, and nothing stays when it is closed."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cache.ssd.direct import PAGE
from engine.config.machine import IN_MEMORY, file_system
from engine.offload.spool import PIECE_BYTES, Spool

SEED = 11


@pytest.fixture
def spool(tmp_path):
    made = Spool(tmp_path / "new" / "folder")
    yield made
    made.close()


def parts_of(*sizes: int) -> list[np.ndarray]:
    random = np.random.default_rng(SEED)
    return [random.integers(0, 256, size, np.uint8) for size in sizes]


def memory(nbytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def test_extents_come_back(spool):
    first, second = parts_of(10, PAGE, 3 * PAGE + 5), parts_of(2 * PIECE_BYTES + 17, 1)
    extents = [spool.append([part.data for part in parts]) for parts in (first, second)]
    spool.settle()
    for extent, parts in zip(reversed(extents), (second, first), strict=True):
        into = memory(extent.nbytes)
        spool.read(extent, into.data)
        assert extent.nbytes % PAGE == 0 and all(offset % PAGE == 0 for offset in extent.offsets)
        for offset, part in zip(extent.offsets, parts, strict=True):
            assert (into[offset : offset + len(part)] == part).all()


def test_a_larger_buffer_keeps_what_is_behind(spool):
    (part,) = parts_of(PAGE)
    extent = spool.append([part.data])
    into = memory(3 * PAGE)
    into[:] = 7
    spool.read(extent, into.data)
    assert (into[:PAGE] == part).all() and (into[PAGE:] == 7).all()


def test_the_file_has_no_name(spool, tmp_path):
    spool.append([part.data for part in parts_of(PAGE)])
    assert not list(tmp_path.rglob("*layers*")) and (tmp_path / "new" / "folder").is_dir()


def test_what_was_read_is_not_in_the_page_cache(spool):
    """By mincore of a mapping of the file, where it has direct access."""
    if not spool.direct:
        pytest.skip("no direct access here")
    extent = spool.append([part.data for part in parts_of(64 * PAGE)])
    spool.settle()
    spool.read(extent, memory(extent.nbytes).data)
    assert cached_pages(spool._file.fd, extent.nbytes) == 0


def cached_pages(fd: int, nbytes: int) -> int:
    import ctypes

    with mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        there = (ctypes.c_ubyte * (nbytes // PAGE))()
        first = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), there)
        assert failed == 0, os.strerror(ctypes.get_errno())
        del first
        return sum(each & 1 for each in there)


def test_an_extent_that_is_gone_is_an_error(spool):
    extent = spool.append([part.data for part in parts_of(4 * PAGE)])
    os.ftruncate(spool._file.fd, PAGE)
    with pytest.raises(OSError, match="ends at"):
        spool.read(extent, memory(extent.nbytes).data)


MOUNTS = """\
22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /dev/shm rw shared:2 master:3 - tmpfs tmpfs rw
"""


def test_the_kind_of_a_file_system(tmp_path):
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    for kind in ("ext4", "tmpfs"):
        mine = f"99 1 {os.major(device)}:{os.minor(device)} / /x rw - {kind} none rw\n"
        mounts.write_text(MOUNTS.replace("8:1", "250:250").replace("0:21", "251:251") + mine)
        assert file_system(tmp_path / "not" / "there", mounts) == kind
    assert file_system(tmp_path, tmp_path / "no such file") == ""
    assert file_system(Path("/proc")) not in IN_MEMORY


def test_after_a_failed_read_nothing_writes_into_its_memory_any_more(spool, monkeypatch):
    """One piece fails while another is still being read: the caller may read something else into the memory."""
    (part,) = parts_of(3 * PIECE_BYTES)
    extent = spool.append([part.data])
    failed, read = threading.Event(), spool._file.read

    def broken(offset, count, into):
        if offset == extent.begin:
            failed.set()
            raise OSError(errno.EIO, "broken")
        assert failed.wait(60)
        time.sleep(0.1)
        read(offset, count, into)

    monkeypatch.setattr(spool._file, "read", broken)
    into = memory(extent.nbytes)
    with pytest.raises(OSError, match="broken"):
        spool.read(extent, into.data)
    into[:] = 0
    time.sleep(0.3)
    assert not into.any()
