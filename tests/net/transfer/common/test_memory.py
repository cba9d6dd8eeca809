"""Regions: one memory seen through two mappings, sealed size, nothing leaked."""

import ctypes
import os
from pathlib import Path

import pytest

from net.transfer.common.memory import HUGE_BYTES, Region


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_two_mappings_see_the_same_bytes():
    with Region.shared("a", 10000) as region, Region.attach("a", os.dup(region.memfd), 10000) as other:
        region.memory[9000:9004] = b"kvkv"
        assert bytes(other.memory[9000:9004]) == b"kvkv"
        assert region.nbytes == other.nbytes == len(region.memory) == 10000


def test_mappings_of_large_regions_are_where_huge_pages_can_be():
    size = 2 * HUGE_BYTES + 4096
    with Region.shared("a", size) as region, Region.attach("a", os.dup(region.memfd), size) as other:
        assert region.address % HUGE_BYTES == other.address % HUGE_BYTES == 0
        region.memory[-4:] = b"last"
        assert bytes(other.memory[-4:]) == b"last"
        assert ctypes.string_at(other.address + size - 4, 4) == b"last"
        mapped = Path("/proc/self/smaps").read_text()
    assert f"\n{region.address:x}-" in mapped
    assert f"\n{region.address:x}-" not in Path("/proc/self/smaps").read_text()


def test_close_returns_every_descriptor_and_is_idempotent():
    before = open_fds()
    regions = [Region.shared("a", 4096), Region.private("b", 4096)]
    regions.append(Region.attach("a", os.dup(regions[0].memfd), 4096))
    assert open_fds() > before
    for region in regions:
        region.close()
        region.close()
    assert open_fds() == before


def test_a_view_outlives_the_region():
    region = Region.shared("a", 4096)
    view = region.memory[:4]
    region.close()
    view[:] = b"safe"
    assert bytes(view) == b"safe"


def test_the_size_is_sealed():
    with Region.shared("a", 4096) as region, pytest.raises(PermissionError):
        os.ftruncate(region.memfd, 0)


def test_attach_refuses_what_could_kill_this_process():
    before = open_fds()
    with Region.shared("a", 4096) as region:
        with pytest.raises(ValueError, match="fewer than"):
            Region.attach("a", os.dup(region.memfd), 8192)
        unsealed = os.memfd_create("b", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, 4096)
        with pytest.raises(ValueError, match="may shrink"):
            Region.attach("b", unsealed, 4096)
    assert open_fds() == before


@pytest.mark.parametrize("make", [Region.shared, Region.private])
def test_empty_regions_are_refused(make):
    with pytest.raises(ValueError, match="at least one byte"):
        make("a", 0)
