"""Which congestion control data connections get, and that they have it."""

import socket

import pytest

from net.channel import congestion
from net.transfer.common.memory import Region
from net.transfer.engine import BULK, URGENT, Op, TransferEngine
from tests.net.peers import channels


def of(sock) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def test_within_a_host_the_plainest_and_between_hosts_the_default():
    assert congestion.chosen("auto", within_host=True) == "reno"
    assert congestion.chosen("auto", within_host=False) is None
    assert congestion.chosen("dctcp", within_host=True) == congestion.chosen("dctcp", within_host=False) == "dctcp"


def test_one_that_is_not_there_is_named_with_the_flag():
    congestion.check("auto")
    congestion.check("reno")
    with pytest.raises(ValueError, match=r"--tcp-congestion nothing: the kernel does not have it; available: .*reno"):
        congestion.check("nothing")


async def test_both_ends_of_data_connections_have_it_and_control_connections_do_not():
    with socket.socket() as probe:
        default = of(probe)
    async with channels("a", "b") as made:
        a, b = (TransferEngine(one, ["tcp"]) for one in made)
        with Region.private("x", 4096) as x, Region.private("y", 4096) as y:
            a.register(x)
            b.register(y)
            for priority in (BULK, URGENT):
                await a.submit("b", Op.WRITE, "x", "y", [(0, 0, 4096)], priority=priority)
            for channel in made:
                ends = [one for one in channel.links._everyone if one.is_open]
                used = {one.purpose: of(one._transport.get_extra_info("socket")) for one in ends}
                assert used == {"control": default, "data": "reno", "urgent data": "reno"}
            await a.close()
            await b.close()
