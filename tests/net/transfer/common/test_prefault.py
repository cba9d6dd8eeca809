"""Populating memory ahead: pages are there, contents are not touched, and it stops when told."""

from pathlib import Path

from net.transfer.common.memory import Region
from net.transfer.common.prefault import STRIDE_BYTES, Prefault


def plenty() -> int:
    return 1 << 40


def idle() -> bool:
    return False


def resident_bytes(region: Region) -> int:
    """Of the region's mapping in this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{region.address:x}-"):
            return next(int(other.split()[1]) << 10 for other in lines if other.startswith("Rss:"))
    raise AssertionError("the region is not mapped")


def test_every_page_is_there_and_holds_what_it_held():
    with Region.shared("a", 2 * STRIDE_BYTES + 12345) as region:
        region.memory[5000:5004] = b"kvkv"
        assert resident_bytes(region) < STRIDE_BYTES
        prefault = Prefault([region], plenty, idle)
        prefault.start()
        prefault.join()
        assert resident_bytes(region) >= region.nbytes == prefault.populated
        assert bytes(region.memory[5000:5004]) == b"kvkv"
        assert not any(region.memory[:5000:100])


def test_it_leaves_the_rest_alone_when_memory_is_short():
    left = [2 * STRIDE_BYTES, STRIDE_BYTES, STRIDE_BYTES - 1]
    with Region.shared("a", 8 * STRIDE_BYTES) as region:
        prefault = Prefault([region], iter(left).__next__, idle)
        prefault.start()
        prefault.join()
        assert prefault.populated == 2 * STRIDE_BYTES


def test_it_waits_while_somebody_wants_the_cores():
    busy = iter([True, True, False, False])
    with Region.shared("a", 2 * STRIDE_BYTES) as region:
        prefault = Prefault([region], plenty, busy.__next__)
        prefault.start()
        prefault.join()
        assert prefault.populated == region.nbytes
        assert next(busy, None) is None


def test_closing_ends_it_busy_or_not_and_before_the_start_too():
    with Region.shared("a", 2 * STRIDE_BYTES) as region:
        never = Prefault([region], plenty, idle)
        never.close()
        waiting = Prefault([region], plenty, lambda: True)
        waiting.start()
        waiting.close()
        waiting.close()
        assert waiting.populated == 0
