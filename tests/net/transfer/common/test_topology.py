"""Near and far on machines that exist only as folders, the topology file, and rails that pair by number."""

import json

import pytest

from net.transfer.common.memory import Region
from net.transfer.common.rails import Rail, choose
from net.transfer.common.topology import FAR, NEAR, Nic, Overrides, Topology, pairs, parse
from net.transfer.rdma import places

# Two sockets; on the first a switch with mlx5_0 and GPU 0, and mlx5_1 next to it; mlx5_2 and GPU 1 on the second.
CARDS = {
    "mlx5_0": ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0", 0),
    "mlx5_1": ("pci0000:00/0000:00:02.0/0000:05:00.0", 0),
    "mlx5_2": ("pci0000:80/0000:80:01.0/0000:81:00.0", 1),
}
GPUS = {"0000:03:00.0": "pci0000:00/0000:00:01.0/0000:01:00.0", "0000:82:00.0": "pci0000:80/0000:80:01.0"}


@pytest.fixture
def sysfs(tmp_path):
    for name, (path, numa_node) in CARDS.items():
        device = tmp_path / "devices" / path
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa_node}\n")
        link = tmp_path / "class" / "infiniband" / name
        link.mkdir(parents=True)
        (link / "device").symlink_to(device)
    for address, path in GPUS.items():
        device = tmp_path / "devices" / path / address
        device.mkdir(parents=True)
        (tmp_path / "bus" / "pci" / "devices").mkdir(parents=True, exist_ok=True)
        (tmp_path / "bus" / "pci" / "devices" / address).symlink_to(device)
    return tmp_path


def test_cards_are_near_memory_of_their_socket_and_gpus_behind_their_switch(sysfs):
    topology = Topology(places.nics(list(CARDS), sysfs))
    assert topology.near("numa:0") == {"mlx5_0", "mlx5_1"}
    assert topology.near("numa:1") == {"mlx5_2"}
    assert topology.near("numa:7") == set(CARDS), "no card there: all are as good"
    assert topology.near(None) == topology.near("elsewhere:3") == set(CARDS)
    assert topology.near(*places.gpu("cuda:0@0000:03:00.0", sysfs)) == {"mlx5_0"}
    assert topology.near(*places.gpu("cuda:1@0000:82:00.0", sysfs)) == {"mlx5_2"}
    assert topology.near(*places.gpu("cuda:1", sysfs)) == set(CARDS)
    assert topology.distances(["mlx5_2", "mlx5_0"], topology.near("numa:0")) == [FAR, NEAR]
    assert not topology.one_place


def test_a_machine_that_says_nothing_has_only_near_cards(tmp_path):
    device = tmp_path / "class" / "infiniband" / "rxe0"
    device.mkdir(parents=True)
    nics = places.nics(["rxe0", "gone"], tmp_path)
    assert nics == [Nic("rxe0"), Nic("gone")]
    topology = Topology(nics)
    assert topology.one_place
    assert topology.near("numa:0") == topology.near("cuda:0", ("pci0000:00",)) == {"rxe0", "gone"}


def test_a_file_overrides_numbers_places_and_sockets(sysfs, tmp_path):
    text = """
        [rails]
        mlx5_2 = 0
        mlx5_0 = 4
        [numa]
        mlx5_1 = 1
        [near]
        "numa:0" = ["mlx5_2", "not here"]
        "cuda:0" = ["mlx5_1"]
    """
    (tmp_path / "t.toml").write_text(text)
    topology = Topology(places.nics(list(CARDS), sysfs), places.overrides(str(tmp_path / "t.toml")))
    assert list(topology.rail_numbers.items()) == [("mlx5_2", 0), ("mlx5_1", 1), ("mlx5_0", 4)]
    assert topology.near("numa:0") == {"mlx5_2"}
    assert topology.near("numa:1") == {"mlx5_1", "mlx5_2"}
    assert topology.near(*places.gpu("cuda:0@0000:03:00.0", sysfs)) == {"mlx5_1"}
    as_json = json.dumps({"rails": {"mlx5_2": 0, "mlx5_0": 4}, "numa": {"mlx5_1": 1}})
    assert parse(as_json, True) == Overrides({"mlx5_2": 0, "mlx5_0": 4}, {"mlx5_1": 1}, {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rails = 3", "not a table"),
        ("[rails]\na = -1", "at least 0"),
        ("[rails]\na = true", "at least 0"),
        ("[rails]\na = 1\nb = 1", "same number"),
        ('[near]\n"gpu0" = ["a"]', "places like"),
        ('[near]\n"cuda:0" = []', "list of devices"),
        ("[nics]\na = 1", "contain only the tables"),
        ("[rails", "not TOML"),
    ],
)
def test_a_wrong_file_is_named_with_the_flag(tmp_path, text, why):
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(ValueError, match=rf"--topology-file .*t\.toml: .*{why}"):
        places.overrides(str(tmp_path / "t.toml"))
    with pytest.raises(ValueError, match="--topology-file nothing: No such file"):
        places.overrides("nothing")


def test_rails_pair_by_number_not_by_name():
    ours, theirs = {"a0": 0, "a1": 1, "a2": 5}, {"b9": 1, "b8": 0, "b7": 2}
    assert pairs(ours, theirs) == [("a0", "b8"), ("a1", "b9")]
    assert pairs(ours, {"x": 7}) == []


def test_far_rails_wait_for_near_ones_to_fail():
    rails = [Rail("near", up=True, bytes_per_s=1e9), Rail("far", up=True, bytes_per_s=9e9)]
    assert choose(rails, 10, [1, 1], [NEAR, FAR]) == 0
    assert choose(rails, 10, [0, 1], [NEAR, FAR]) is None, "a full queue is no reason to go the long way"
    rails[0].failed(0.0)
    assert choose(rails, 10, [0, 1], [NEAR, FAR]) == 1
    rails[1].sent(0.0, 100)
    assert choose(rails, 10, [0, 1], [NEAR, FAR], window=100) is None
    assert choose(rails, 10, [0, 1], [NEAR, FAR], window=101) == 1


def test_where_memory_is_when_the_kernel_tells():
    with Region.private("x", 4096) as region:
        region.memory[0] = 1
        assert places.of(region) in (None, *(f"numa:{node}" for node in range(64)))
        region.place = "cuda:0@0000:03:00.0"
        assert places.of(region) == "cuda:0@0000:03:00.0"
        topology = Topology([Nic("a", 0), Nic("b", 1)])
        region.place = "numa:1"
        assert places.far_rails(topology, region, ["a", "b"]) == [FAR, NEAR]
