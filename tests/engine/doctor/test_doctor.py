"""Each check on machines that have and lack what it looks for, written as trees of files; and a real peer."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from engine.config.config import Config
from engine.config.machine import Gpu
from engine.doctor import compute, memory, paths, rails, rdma, storage, tcp
from engine.doctor.finding import FAIL, OK, WARN, System, careful
from engine.doctor.paths import Tried, verdict
from engine.doctor.run import examine, main, show
from net.http.client import ClusterError
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine
from net.transfer.rdma.transport import PLAINTEXT
from tests.net.peers import channels

DEVICE = "sys/class/infiniband/mlx5_0"
ONE_NIC = {
    f"{DEVICE}/ports/1/state": "4: ACTIVE",
    f"{DEVICE}/ports/1/link_layer": "Ethernet",
    f"{DEVICE}/ports/1/rate": "100 Gb/sec (4X EDR)",
    f"{DEVICE}/ports/1/gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001",
    f"{DEVICE}/ports/1/gids/1": rdma.ZERO_GID,
    f"{DEVICE}/ports/1/gid_attrs/types/0": "RoCE v2",
    f"{DEVICE}/device/net/eth7/ifindex": "3",
    f"{DEVICE}/device/numa_node": "1",
    "sys/class/net/eth7/mtu": "9000",
}


@pytest.fixture
def machine(tmp_path):
    """machine({path: text}, **environ) -> System"""

    def write(files: dict[str, str] = {}, **environ: str) -> System:  # noqa: B006
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text + "\n")
        return System(tmp_path, environ)

    return write


def test_a_device_that_is_ready(machine):
    (one,) = rdma.devices(machine(ONE_NIC))
    assert (one.check, one.status, one.remedy) == ("mlx5_0", OK, "")
    for said in ("100 Gb/sec", "4: ACTIVE", "1 GIDs (RoCE v2)", "NUMA node 1", "packets of 4096 bytes"):
        assert said in one.found


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({f"{DEVICE}/ports/1/state": "1: DOWN"}, "ip link set dev eth7 up"),
        ({f"{DEVICE}/ports/1/gids/0": rdma.ZERO_GID}, "eth7 an IP address"),
        ({"sys/class/net/eth7/mtu": "1500"}, "mtu 4200"),
    ],
)
def test_a_device_that_is_not_says_how_to_repair_it(machine, change, remedy):
    (one,) = rdma.devices(machine(ONE_NIC | change))
    assert one.status == WARN and remedy in one.remedy


def test_without_a_device_nobody_needs_the_library(machine):
    def absent(name):
        raise OSError(name)

    assert [one.status for one in rdma.library(machine(), absent)] == [OK]
    assert [one.status for one in rdma.devices(machine())] == [WARN]
    (one,) = rdma.library(machine(ONE_NIC), absent)
    assert one.status == WARN and "apt install" in one.remedy
    assert rdma.library(machine(ONE_NIC), str)[0].status == OK


def test_rails_and_their_places(machine, tmp_path):
    assert rails.rails(machine())[0].found == "no RDMA device, so no rails"
    system = machine(ONE_NIC | {"sys/class/infiniband/mlx5_1/ports/1/state": "4: ACTIVE"})
    (one,) = rails.rails(system)
    assert one.found == "0 = mlx5_0 (NUMA node 1), 1 = mlx5_1 (NUMA node unknown)"
    assert one.status == OK and "--topology-file" in one.remedy
    assert rails.rails(system, ["mlx5_0"])[0].remedy == ""
    assert rails.rails(system, ["mlx5_9"])[0].status == FAIL
    file = tmp_path / "t.toml"
    file.write_text("[rails]\nmlx5_1 = 0\nmlx5_0 = 1\n[numa]\nmlx5_1 = 0\n")
    (one,) = rails.rails(system, (), str(file))
    assert (one.found, one.remedy) == ("0 = mlx5_1 (NUMA node 0), 1 = mlx5_0 (NUMA node 1)", "")
    file.write_text("[rails]\nmlx4_0 = 0\n")
    assert rails.rails(system, (), str(file))[0].status == WARN
    file.write_text("[rails")
    (one,) = rails.rails(system, (), str(file))
    assert one.status == FAIL and "--topology-file" in one.found


def test_whether_cards_could_reach_gpu_memory(machine):
    def old(name):
        return object()

    class New:
        ibv_reg_dmabuf_mr = None

    assert "no GPU" in rails.gpudirect(machine(ONE_NIC))[0].found
    gpu = {"proc/driver/nvidia/gpus/0000:03:00.0/information": "Model: H200"}
    assert rails.gpudirect(machine(ONE_NIC | gpu), old)[0].status == WARN
    assert rails.gpudirect(machine(ONE_NIC | gpu), lambda name: New)[0].status == OK


def test_locked_memory_matters_to_rdma_only(machine, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    assert rdma.locked_memory(machine())[0].status == OK
    system = machine(ONE_NIC)
    assert rdma.locked_memory(system)[0].status == WARN
    assert rdma.locked_memory(system, 2 << 20)[0].status == FAIL
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert rdma.locked_memory(system, 2 << 20)[0].status == OK


def test_shared_memory_and_pages(machine):
    assert memory.memfd(machine())[0].status == OK
    assert memory.shm(machine())[0].status == WARN  # not there
    (pages,) = memory.huge_pages(machine())
    assert pages.status == WARN and "shmem_enabled" in pages.remedy
    chosen = {"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never"}
    assert memory.huge_pages(machine(chosen))[0].status == OK
    low = {"proc/meminfo": "MemAvailable: 200000 kB"}
    assert memory.free_memory(machine(low))[0].status == WARN


def test_the_path_of_lmdb(machine, tmp_path):
    def status(path, nbytes=1):
        return storage.lmdb_path(machine(), path and str(path), nbytes)[0].status

    (tmp_path / "file").write_text("x")
    assert status(None) == OK
    assert status(tmp_path / "new" / "deeper") == OK
    assert status(tmp_path, 1 << 60) == FAIL
    assert status(tmp_path / "file") == FAIL
    assert status(Path("/proc/mooncake")) == FAIL


def test_the_folder_of_layers_that_are_read(machine, tmp_path):
    def found(folder, offload="auto", kind="ext4"):
        device = tmp_path.stat().st_dev
        mounts = f"22 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} /dev/sda1 rw"
        return storage.offload_path(machine({"proc/self/mountinfo": mounts}), offload, folder and str(folder))

    assert found(tmp_path, "none") == []
    assert found(None)[0].status == OK
    assert found(tmp_path / "new" / "deeper")[0].status in (OK, WARN)  # whether it is read past the page cache
    assert (
        found(tmp_path, kind="tmpfs")[0].status == FAIL and "lies in memory" in found(tmp_path, kind="tmpfs")[0].found
    )
    assert found(Path("/proc/mooncake"))[0].status == FAIL


def test_what_limits_tcp(machine):
    assert tcp.buffers(machine())[0].status == OK  # nothing is known
    small = {"proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456", "proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t65536"}
    (one,) = tcp.buffers(machine(small))
    assert one.status == WARN and "net.ipv4.tcp_wmem" in one.remedy and "tcp_rmem" not in one.remedy
    assert "receive 6 MiB" in one.found and "send 64 KiB" in one.found
    assert (
        "dctcp between hosts" in tcp.congestion(machine({"proc/sys/net/ipv4/tcp_congestion_control": "dctcp"}))[0].found
    )
    assert "only the loopback" in tcp.interfaces(machine())[0].found
    net = "sys/class/net"
    lo = {f"{net}/lo/operstate": "up", f"{net}/lo/mtu": "65536", f"{net}/down/operstate": "down"}
    eth = {f"{net}/eth0/operstate": "up", f"{net}/eth0/mtu": "1500", f"{net}/eth0/speed": "25000"}
    (one,) = tcp.interfaces(machine(lo | eth))
    assert (one.check, one.status) == ("network eth0", WARN) and "mtu 9000" in one.remedy
    for better in ({f"{net}/eth0/mtu": "9000"}, {f"{net}/eth0/speed": "-1"}, {f"{net}/eth0/speed": "1000"}):
        assert tcp.interfaces(machine(lo | eth | better))[0].status == OK


def test_what_computes(machine):
    assert compute.compiler(machine(), lambda name: None)[0].status == WARN
    assert compute.compiler(machine(), lambda name: "/usr/bin/g++")[0].found == "/usr/bin/g++"
    fast = machine({"proc/cpuinfo": "flags : fma avx2 avx512_bf16", "proc/meminfo": "MemAvailable: 9000000 kB"})
    assert compute.cpu(fast)[0].status == OK
    assert compute.openmp(machine(OMP_WAIT_POLICY="active"))[0].status == WARN
    assert compute.openmp(machine(OMP_WAIT_POLICY="PASSIVE"))[0].status == OK
    assert "OMP_NUM_THREADS=4" in compute.openmp(machine(OMP_NUM_THREADS="4"))[0].found
    assert compute.gpu(machine())[0].status == OK
    driver = machine({"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: H200"})
    assert compute.gpu(driver, lambda: None)[0].status == WARN
    assert "H200" in compute.gpu(driver, lambda: Gpu("H200", 1 << 37, 1 << 37, True))[0].found


def test_a_check_that_fails_is_a_finding():
    (one,) = careful("odd", lambda system: 1 / 0, System())
    assert one.status == WARN and "ZeroDivisionError" in one.found


def test_an_empty_machine_gets_a_whole_report(machine):
    findings = examine(Config(), machine())
    assert not [one for one in findings if "could not be checked" in one.found]
    assert findings[-1].check == "path, two hosts" and findings[-1].found.startswith("tcp")
    assert "to improve" in show(findings)


def test_the_verdict_says_how_to_get_a_better_path():
    refused = Tried("rdma", False, "no device")
    one = verdict([Tried("shm", False, "another host"), refused, Tried("tcp", True, "TCP")])
    assert one.status == WARN and "for shm" in one.remedy and "for rdma" in one.remedy
    assert verdict([Tried("shm", True, "same host"), refused]).remedy == ""
    assert verdict([refused]).status == FAIL


def test_a_cluster_key_keeps_kv_off_rdma_and_the_doctor_says_how_to_change_that(machine):
    active = machine(ONE_NIC)
    assert paths.expected(active)[1].found.startswith("rdma")
    sealed = paths.expected(active, sealed_only=True)[1]
    assert sealed.found.startswith("tcp") and "for rdma: --rdma-plaintext" in sealed.remedy
    tried = [Tried("rdma", False, f"the peer: {PLAINTEXT}"), Tried("tcp", True, "TCP")]
    assert "--rdma-plaintext" in verdict(tried).remedy


async def test_the_transports_to_a_peer_are_tried(monkeypatch):
    async with channels("node-1") as (channel,):
        transfer = TransferEngine(channel, ("shm", "tcp"))
        region = Region.shared("kv", 4096)
        transfer.register(region)

        async def cluster(address, key, timeout_s, cluster_key):
            if address == "127.0.0.1:2":
                raise ClusterError("--join 127.0.0.1:2: no node answers")
            host, port = channel.links.address
            return {"node_id": "node-1", "control": [host, port], "model": "m", "root": "same"} | {
                "block_size": 16,
                "dtype": "float32",
                "pool_dtype": "float32",
                "wire_dtype": "float32",
                "members": [
                    {"node_id": "node-1", "status": "alive", "http": "http://127.0.0.1:1"},
                    {"node_id": "node-2", "status": "alive", "http": "http://127.0.0.1:2"},
                    {"node_id": "node-3", "status": "dead", "http": "http://127.0.0.1:3"},
                ],
            }

        monkeypatch.setattr(paths, "fetch_cluster", cluster)
        findings = {one.check: one for one in await paths.to_peer("127.0.0.1:1", None, {})}
        assert findings["shm to node-1"].status == findings["tcp to node-1"].status == OK
        assert findings["rdma to node-1"].status == WARN and "not offered" in findings["rdma to node-1"].found
        assert list(findings)[-2:] == ["path to node-2", "path to node-1"]
        assert findings["path to node-1"].found.startswith("shm")
        away = findings["path to node-2"]
        assert (away.status, away.found) == (FAIL, "no node answers")
        await transfer.close()
        region.close()


def test_the_command_prints_json_and_names_an_unreachable_peer(capsys):
    assert main(["--json", "--peer", "127.0.0.1:1", "--ssd-path", "/proc/no"]) == 1
    findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
    assert findings["peer"]["status"] == FAIL and "--peer 127.0.0.1:1" in findings["peer"]["found"]
    assert findings["LMDB"]["status"] == FAIL
