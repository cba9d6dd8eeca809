"""The gated delta rule of aarch64 (level neon): compiled by the cross compiler, run in qemu-user, on its grid."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from attention.cpu import build as cpu_build
from attention.cpu.delta_rule import SOURCES, CpuRule, Delta
from attention.cpu.library import FLAGS, FOLDER
from lab.bench.attention.delta_grid import Point, find_delta_fault
from tests.attention.emulated import COMPILER, EMULATOR, MISSING

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not on PATH: {', '.join(MISSING)} (Debian: apt install g++-aarch64-linux-gnu qemu-user)"
)

ITEMS = {0: 4, 1: 2, 2: 2}
"""`Dtype` of paged.h -> bytes."""


class EmulatedRule(CpuRule):
    """A process of qemu for each call."""

    def __init__(self, program: Path) -> None:
        self.program = program
        self.library = self  # type: ignore[assignment]  # its kernels are methods here

    def step(self, tokens, place, read, fresh, write, out):
        self.memory_bytes = place.memory.nbytes
        super().step(tokens, place, read, fresh, write, out)

    def chunk(self, tokens, place, read, fresh, write, out):
        self.memory_bytes = place.memory.nbytes
        super().chunk(tokens, place, read, fresh, write, out)

    def mooncake_delta_step(self, address):
        self._run(b"s", Delta.from_address(address), requests=Delta.from_address(address).rows)

    def mooncake_delta_chunk(self, address):
        self._run(b"c", Delta.from_address(address), requests=1)

    def _run(self, kernel, call, requests):
        item, gates = ITEMS[call.dtype], call.rows * call.value_heads
        keys = call.key_heads * call.key_size
        sizes = {
            "q": item * ((call.rows - 1) * call.q_row + keys),
            "k": item * ((call.rows - 1) * call.k_row + keys),
            "v": item * ((call.rows - 1) * call.v_row + call.value_heads * call.value_size),
            "decay": 4 * gates * (call.key_size if call.by_channel else 1),
            "rate": 4 * gates,
            "out": item * gates * call.value_size,
            "memory": self.memory_bytes,
            "pieces": 2 * 24,
            "read": 8 * requests * call.groups,
            "write": 8 * requests * call.groups,
            "fresh": requests,
        }
        given = [kernel, bytes(call)]
        for name, size in sizes.items():
            address = getattr(call, name)
            given.append(struct.pack("<q", -1 if address is None else size))
            given.append(b"" if address is None else ctypes.string_at(address, size))
        done = subprocess.run([EMULATOR, str(self.program)], input=b"".join(given), capture_output=True, check=True)
        ctypes.memmove(call.out, done.stdout, sizes["out"])
        ctypes.memmove(call.memory, done.stdout[sizes["out"] :], sizes["memory"])


@pytest.fixture(scope="module")
def neon(tmp_path_factory: pytest.TempPathFactory) -> EmulatedRule:
    program = tmp_path_factory.mktemp("neon") / "delta"
    flags = [flag for flag in cpu_build.FLAGS if flag != "-fPIC"]
    sources = [*SOURCES, Path(__file__).with_name("delta_emulated.cpp")]
    command = [COMPILER, *flags, *FLAGS, "-Werror", "-static", f"-I{FOLDER}"]
    subprocess.run([*command, *map(str, sources), "-o", str(program)], check=True)
    return EmulatedRule(program)


@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
def test_no_further_from_the_truth_than_twice_plain_torch(neon: EmulatedRule, by_channel: bool) -> None:
    """Few points: qemu is slow, and what the levels have in common is tested on those of this CPU."""
    for point in (
        Point("everything", (2, 4, 64, 32), 0.05, by_channel, torch.float32),
        Point("everything", (1, 3, 12, 20), 3.0, by_channel, torch.bfloat16, moves=False),
        Point("chunks", (1, 1, 16, 48), 0.05, by_channel, torch.float16),
    ):
        assert find_delta_fault(neon, point) is None, point
