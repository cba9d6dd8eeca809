"""Every combination of flags that cannot work is refused at start, with the reason and the flag to change."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.fits import beyond_free_memory
from engine.config.flags import UsageError, parse
from engine.config.machine import survey
from engine.config.resolve import GiB
from engine.doctor.finding import FAIL, OK, System
from engine.doctor.memory import free_memory
from engine.doctor.run import examine
from engine.loading.shared_memory import shared_memory
from tests.engine.config.test_resolve import H100, LAPTOP, settle

ROOT = Path(__file__).resolve().parents[3]
SMALL = replace(LAPTOP, total_bytes=16 * GiB)

ALWAYS = [
    (f"--node-id {'a' * 65}", "--node-id: expected a printable name of 1 to 64 bytes"),
    (f"--site {'a' * 65}", "--site: expected a printable name of 1 to 64 bytes"),
    (f"--network-place {'a' * 65}", "--network-place: expected a printable name of 1 to 64 bytes"),
    ("--model none", "--role store, not mixed"),
    ("--model none --role prefill", "--role store, not prefill"),
    ("--host 0.0.0.0", "name one of this machine"),
    ("--port 9000 --control-port 9000", "need one each"),
    ("--port 9000 --join 127.0.0.1:9000", "is this node itself"),
    ("--role prefill --first-role decode", "--role mixed or prefill,decode"),
    ("--prompt-lookup-min 5 --prompt-lookup-max 4", "exceeds --prompt-lookup-max"),
    ("--speculative-method draft", "go together"),
    ("--speculative-model x", "go together"),
    ("--speculative-method mtp --speculative-model x", "go together"),
    ("--speculative-method eagle", "go together"),
    (
        "--speculative-method eagle --speculative-model x --beyond-memory on",
        "eagle does not work with --beyond-memory on",
    ),
    ("--speculative-method mtp --tensor-parallel-size 2", "does not work with --tensor-parallel-size 2"),
    ("--speculative-method mtp --expert-parallel-size 2", "does not work with --expert-parallel-size 2"),
    ("--speculative-method mtp --prefill-parallel cpp", "does not work with --prefill-parallel cpp"),
    ("--speculative-method mtp --offload auto", "does not work with --offload auto"),
    ("--speculative-method mtp --beyond-memory on", "does not work with --beyond-memory on"),
    ("--batching-policy mixed --prefill-chunk-tokens 2048", "exceeds --max-num-batched-tokens"),
    ("--weights-from-store --tensor-parallel-size 2", "use one of the two"),
    ("--offload auto --tensor-parallel-size 2", "not with --tensor-parallel-size 2; use one of the two"),
    ("--offload auto --expert-parallel-size 2", "not with --expert-parallel-size 2; use one of the two"),
    ("--offload auto --weights-from-store", "not with --weights-from-store; use one of the two"),
    ("--offload auto --beyond-memory on", "not with --beyond-memory on; use one of the two"),
    ("--weight-memory-bytes 1G", "give it too"),
    ("--offload-path x", "give it too"),
    (
        "--weight-dtype stored --tensor-parallel-size 2",
        "--weight-dtype stored does not work with --tensor-parallel-size",
    ),
    ("--expert-parallel-size 2 --tensor-parallel-size 2", "does not work with --tensor-parallel-size 2"),
    ("--expert-parallel-size 2 --weights-from-store", "does not work with --weights-from-store"),
    ("--expert-parallel-size 2 --device cuda", "does not work with --device cuda"),
    ("--weight-dtype int8 --expert-parallel-size 2", "--weight-dtype int8 does not work with --expert-parallel-size"),
    ("--expert-replicas 2", "give it too"),
    ("--expert-remote-ranks 1", "give it too"),
    ("--max-expert-parallel-size 4", "--max-expert-parallel-size is about the ranks of --expert-parallel-size"),
    (
        "--expert-parallel-size 3 --max-expert-parallel-size 2",
        "--max-expert-parallel-size 2 is less than --expert-parallel-size 3",
    ),
    (
        "--expert-parallel-size 2 --max-expert-parallel-size 4 --expert-balance-steps 5",
        "experts move between ranks that stay, not with --max-expert-parallel-size",
    ),
    (
        "--expert-parallel-size 2 --expert-remote-ranks 3",
        "--expert-remote-ranks 3 is more than --expert-parallel-size 2, all ranks",
    ),
    (
        "--expert-parallel-size 2 --expert-remote-ranks 2 --max-expert-parallel-size 3",
        "--max-expert-parallel-size: experts stay where they are on ranks that nodes share",
    ),
    (
        "--expert-parallel-size 2 --expert-remote-ranks 2 --expert-balance-steps 8",
        "--expert-balance-steps 8: experts stay where they are on ranks that nodes share (--expert-remote-ranks 2",
    ),
    ("--num-redundant-experts 2", "give it too"),
    ("--weight-dtype int8 --weights-from-store", "--weight-dtype int8 does not work with --weights-from-store"),
    ("--transport rdma --cluster-key-file k", "--rdma-plaintext"),
    ("--transport shm --wire-codec exponent", "--wire-codec exponent codes what goes over TCP"),
    ("--transport tcp --rdma-devices mlx5_0", "give --transport auto"),
    ("--transport shm --rdma-devices mlx5_0", "give --transport auto"),
    ("--model none --role store --dram-bytes 1M --value-bytes 2M", "--value-bytes 2097152"),
    ("--model none --role store --attention-elsewhere auto", "--attention-elsewhere auto: a node with --model none"),
    ("--allowed-origins https://a.example,b.example", "'b.example'"),
    ("--cache-shares interactive=0.8,batch=0.8", "--cache-shares"),
    ("--cache-shares nobody=0.1", "no class nobody"),
    ("--join nowhere", "HOST:PORT"),
    ("--kv-events-config {}x", "--kv-events-config is not JSON"),
    ("--backend a:1", "--backend 'a:1' is not http://HOST:PORT"),
    ("--backend http://a:1 --backend http://a:1", "--backend names a:1 twice"),
    ("--backend http://a:1 --role store", "leave out --role store"),
    ("--backend http://a:1 --model none", "give --model"),
]

ON_THIS = [
    ("--block-size 24 --cluster-block-size 16", SMALL, "give --block-size 16, or start the cluster with a --cluster-b"),
    ("--device cuda --kv-cache-dtype fp8 --cluster-kv-dtype bfloat16", H100, "give --block-size 16 --kv-cache-dtype b"),
    ("--block-size 64 --cluster-block-size 16 --beyond-memory on", SMALL, "--beyond-memory on: the tier must keep"),
    (
        "--block-size 64 --cluster-block-size 16 --attention-elsewhere auto",
        SMALL,
        "--attention-elsewhere auto: a holder",
    ),
    (
        "--block-size 64 --cluster-block-size 16 --pool-dtype int4-auto",
        SMALL,
        "with --pool-dtype int4-auto no node converts its blocks to others of the cluster; give --block-size 16",
    ),
    ("--device cuda --pool-dtype int4-auto", H100, "--pool-dtype int4-auto: only a CPU encodes blocks"),
    ("--kv-cache-dtype int8 --pool-dtype int4-auto", SMALL, "--pool-dtype int4-auto: with --kv-cache-dtype int8"),
    ("--kv-cache-dtype int8 --cluster-kv-dtype float32 --kv-staging-bytes 64K", SMALL, "fewer than 4 converted blocks"),
    ("--kv-cache-bytes 64G", SMALL, "--kv-cache-bytes 6871"),
    ("--kv-cache-bytes 9G --dram-bytes 9G", SMALL, "--dram-bytes 9663"),
    ("--role store --dram-bytes 17G", SMALL, "16384 MiB"),
    ("--device cuda", SMALL, "no NVIDIA GPU"),
    ("--device cuda --offload auto", H100, "not with --device cuda; give --device cpu"),
    ("--offload auto --weight-memory-bytes 17G", SMALL, "--weight-memory-bytes 18253611008: this machine"),
    ("--device cuda --kv-cache-bytes 90G", H100, "the GPUs of this node have 81920 MiB"),
    ("--device cuda --pool-dtype int8", H100, "--device cpu"),
    ("--kv-cache-dtype int8 --pool-dtype int4", SMALL, "--pool-dtype int4: with --kv-cache-dtype int8 the pool keeps"),
    ("--device cuda --wire-dtype int8", H100, "--wire-dtype int8: only a CPU encodes blocks; use --device cpu"),
    ("--device cuda --tensor-parallel-size 3", H100, "torch sees 1"),
    ("--tensor-parallel-size 2", SMALL, "--tensor-parallel-size 2"),
    ("--max-model-len 100000", SMALL, "exceeds the model's"),
    ("--kv-cache-bytes 1M --max-model-len 8192", SMALL, "give --kv-cache-bytes"),
    ("--kv-cache-dtype fp8 --pool-dtype int8", SMALL, "leave out one of the two"),
    ("--kv-cache-dtype fp8 --wire-dtype int8", SMALL, "--wire-dtype int8: with --kv-cache-dtype fp8 decode nodes get"),
    ("--wire-dtype int8 --kv-staging-bytes 64K", SMALL, "--kv-staging-bytes 65536 holds fewer than 4 encoded blocks"),
    ("--pool-dtype fp8 --kv-staging-bytes 64K", SMALL, "--kv-staging-bytes 65536 holds fewer than 4 encoded blocks"),
    ("--role store --dram-bytes 1K", SMALL, "holds no block"),
    ("--role store --dram-bytes 0", SMALL, "holds no block"),
    ("--role decode,store --dram-bytes 0", SMALL, "a store node or --ssd-path needs some"),
]


def test_a_node_with_workers_has_no_role():
    config = settle("--backend", "http://a:1", "--backend", "http://b:2,events=tcp://b:3")
    assert config.backend == "http://a:1 http://b:2,events=tcp://b:3"
    assert (config.role, config.roles) == ("acceptor", ())
    assert config.kv_cache_bytes == config.dram_bytes == 0


@pytest.mark.parametrize(("line", "said"), ALWAYS)
def test_refused_whatever_the_machine(line, said):
    with pytest.raises(UsageError) as caught:
        parse(line.split())
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("line", "machine", "said"), ON_THIS)
def test_refused_on_this_machine(line, machine, said):
    with pytest.raises(UsageError) as caught:
        settle(*line.split(), machine=machine)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--role prefill,decode --first-role decode",
        "--port 9000 --join 127.0.0.1:9001",
        "--batching-policy mixed --prefill-chunk-tokens 1024",
        "--transport rdma --cluster-key-file k --rdma-plaintext",
        "--allowed-origins https://a.example,http://localhost:3000",
        "--allowed-origins *",
        "--kv-cache-bytes 9G",
        "--kv-staging-bytes 64K",
        "--kv-cache-dtype int8 --wire-dtype int8",
        "--pool-dtype fp8 --wire-dtype int8 --kv-staging-bytes 1M",
    ],
)
def test_what_works_is_let_through(line):
    settle(*line.split(), machine=SMALL)


@pytest.mark.parametrize("flags", ["--transport rdma --rdma-devices nosuch0", "--rdma-devices nosuch0"])
def test_a_device_that_is_not_here_ends_the_start_with_2(flags):
    """It started healthy, and served nothing."""
    command = [sys.executable, "mooncake.py", "--port", "0", "--model", "none", "--role", "store", "--dram-bytes", "8M"]
    done = subprocess.run([*command, *flags.split()], cwd=ROOT, capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert (
        flags.rpartition(" --")[0] in last and "give --transport auto or tcp" in last and "Traceback" not in done.stderr
    )


def test_what_exceeds_the_free_memory_is_warned_of():
    tight = replace(SMALL, free_bytes=2 * GiB)
    config = settle("--kv-cache-bytes", "3G", "--dram-bytes", "1G", machine=tight)
    assert beyond_free_memory(config, SMALL) is None
    assert str(beyond_free_memory(config, tight)).startswith(
        f"--kv-cache-bytes {config.kv_cache_bytes} + --dram-bytes "
    )


def test_memory_that_the_kernel_refuses_is_one_line_with_its_flag():
    with pytest.raises(UsageError, match=r"^--dram-bytes \d+: the kernel refuses \d+ MiB \(.*\); give less$"):
        shared_memory("--dram-bytes", "x", 1 << 62)


def test_doctor_says_that_memory_flags_are_too_large():
    system = System()
    machine = survey(False)
    assert machine.free_bytes <= machine.total_bytes
    (fails,) = free_memory(system, {"--dram-bytes": machine.total_bytes, "--kv-cache-bytes": 1})
    assert fails.status == FAIL and f"--dram-bytes {machine.total_bytes} + --kv-cache-bytes 1" in fails.found
    assert "--dram-bytes and --kv-cache-bytes" in fails.remedy
    (fails,) = [
        one for one in examine(parse(["--dram-bytes", str(machine.total_bytes + 1)]), system) if one.check == "memory"
    ]
    assert fails.status == FAIL and "--kv-cache-bytes" not in fails.found + fails.remedy
    assert free_memory(system, {"--dram-bytes": 1})[0].status in (OK, "warn")
