"""What a node's record says of tiers and network cards, from counters in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.node.resource_use import NodeUse, Use
from net.metrics.nic_use import NicUse
from sched.gossip.record import NodeRecord


def ethernet(system: Path, name: str, speed: str, received: int, sent: int, virtual: bool = False) -> None:
    card = system / "net" / name
    (card / "statistics").mkdir(parents=True, exist_ok=True)
    if not virtual:
        (card / "device").mkdir(exist_ok=True)
    (card / "speed").write_text(f"{speed}\n")
    (card / "statistics/rx_bytes").write_text(f"{received}\n")
    (card / "statistics/tx_bytes").write_text(f"{sent}\n")


def rdma(system: Path, rate: str, received: int, sent: int) -> None:
    port = system / "infiniband/mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True, exist_ok=True)
    (port / "rate").write_text(rate)
    (port / "counters/port_rcv_data").write_text(f"{received // 4}\n")
    (port / "counters/port_xmit_data").write_text(f"{sent // 4}\n")


def test_shares_of_the_speed_of_all_cards(tmp_path):
    nics = NicUse(tmp_path, listed_s=0.0)
    assert nics.look(0.0) == nics.look(1.0) == (0.0, 0.0), "a machine without cards"
    ethernet(tmp_path, "eth0", "10000", 0, 0)
    ethernet(tmp_path, "br0", "10000", 0, 0, virtual=True)
    ethernet(tmp_path, "eth1", "-1", 0, 0)
    assert nics.look(2.0) == (0.0, 0.0), "nothing to compare with yet"
    ethernet(tmp_path, "eth0", "10000", 5 * 10**8, 10**9)
    ethernet(tmp_path, "br0", "10000", 10**9, 10**9, virtual=True)
    ethernet(tmp_path, "eth1", "-1", 10**9, 10**9)
    assert nics.look(4.0) == pytest.approx((0.2, 0.4))
    rdma(tmp_path, "100 Gb/sec (4X EDR)\n", 0, 0)
    assert nics.look(5.0) == (0.0, 0.0)
    rdma(tmp_path, "100 Gb/sec (4X EDR)\n", 13_750_000_000 // 2, 4 * 10**12)
    assert nics.look(6.0) == pytest.approx((0.5, 1.0)), "never more than all of it"
    ethernet(tmp_path, "eth0", "10000", 0, 0)
    assert nics.look(7.0) == (0.0, 0.0), "counters that begin again"


def test_cards_are_listed_now_and_then_and_their_counters_read_every_time(tmp_path):
    ethernet(tmp_path, "eth0", "1000", 0, 0)
    nics = NicUse(tmp_path, listed_s=10.0)
    assert nics.look(0.0) == (0.0, 0.0)
    ethernet(tmp_path, "eth0", "1000", 125 * 10**6, 0)
    ethernet(tmp_path, "eth1", "1000", 0, 0)
    assert nics.look(2.0) == pytest.approx((0.5, 0.0)), "the new card is not known yet"
    assert nics.look(11.0) == (0.0, 0.0)
    ethernet(tmp_path, "eth1", "1000", 125 * 10**6, 0)
    assert nics.look(12.0) == pytest.approx((0.5, 0.0)), "it is, after the list was made again"
    (tmp_path / "net/eth1/statistics/rx_bytes").unlink()
    assert nics.look(13.0) == (0.0, 0.0), "a card that was taken out is no error"
    ethernet(tmp_path, "eth0", "1000", 250 * 10**6, 0)
    assert nics.look(14.0) == pytest.approx((1.0, 0.0)), "and the share is that of the others"


def test_a_record_tells_what_is_in_use_as_of_a_moment_ago(tmp_path):
    now, tiers = [0.0], {"dram": {"blocks": 1, "capacity": 4}, "ssd": {"blocks": 0, "capacity": 0}}
    use = NodeUse(lambda: tiers, NicUse(tmp_path), lambda: now[0])
    assert use() == Use(dram_fill=0.25)
    tiers["dram"]["blocks"] = 4
    assert use() == Use(dram_fill=0.25)
    now[0] = 1.0
    record = use.onto(NodeRecord(running=3))
    assert record.dram_fill == 1.0 and record.running == 3
    assert NodeUse(dict, NicUse(tmp_path))() == Use()
