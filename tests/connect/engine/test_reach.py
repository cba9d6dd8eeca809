"""By which ways transfers may go."""

import pytest

from connect.engine.reach import Reach


def test_the_protocol_the_devices_and_the_environment():
    assert Reach.of("tcp", "", {}) == Reach()
    assert Reach().order == ("tcp",) and Reach().options == {}
    reach = Reach.of("rdma", "mlx5_0, mlx5_1,", {"MC_GID_INDEX": "3"})
    assert reach.cma and reach.order == ("rdma", "tcp")
    assert reach.options == {"rdma": {"devices": ("mlx5_0", "mlx5_1"), "gid_index": 3}}
    assert Reach.of("rdma", "", {}).options == {"rdma": {"devices": (), "gid_index": None}}
    assert Reach.of("rdma", "", {"MC_FORCE_TCP": "1"}) == Reach(cma=False, huge_pages=False)
    assert not Reach.of("tcp", "", {"MOONCAKE_HUGE_PAGES": "0"}).huge_pages and not reach.huge_pages
    assert Reach.of("tcp", "mlx5_0", {"MOONCAKE_CMA": "0"}).order == ("tcp",)
    assert not Reach.of("rdma", "", {"MOONCAKE_CMA": "0"}).cma and Reach.of("rdma", "", {"MOONCAKE_CMA": "1"}).cma
    with pytest.raises(ValueError, match="MC_GID_INDEX is 'x'"):
        Reach.of("rdma", "", {"MC_GID_INDEX": "x"})
