"""Products of quantized weights for aarch64 (levels neon and neon_dotprod): compiled by the cross compiler, run in
qemu-user, against float64. Shapes are few: qemu is slow, and test_quantized.py and test_byte_weights.py test what the
levels share. A CPU without products of quads of bytes must not meet one; one with them computes the same numbers."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention.cpu import build as cpu_build
from attention.cpu.level import LEVELS, levels_here
from engine.model.ops.cpu import FLAGS, FOLDER, KINDS, VECTORS
from engine.model.ops.quantized import BLOCKS, SHARED, Quantized, Scaled
from tests.attention.emulated import COMPILER, EMULATOR, MISSING
from tests.engine.model.ops import test_byte_weights as in_bytes
from tests.engine.model.ops import test_quantized as in_groups

DISASSEMBLER = "aarch64-linux-gnu-objdump"  # of the compiler's package

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not on PATH: {', '.join(MISSING)} (Debian: apt install g++-aarch64-linux-gnu qemu-user)"
)


PROCESSORS = {"neon": "cortex-a53", "neon_dotprod": "neoverse-n1"}
"""Level -> a CPU that has it and no better one."""


class Programs:
    """The kernels of groups and those of bytes at one level, each in a program."""

    def __init__(self, level: str, folder: Path) -> None:
        self.level, self.made = level, {}
        machine = [cpu_build.MACHINE_FLAGS[each] for each in LEVELS[level] if each in cpu_build.MACHINE_FLAGS]
        flags = [flag for flag in (*cpu_build.FLAGS, *FLAGS) if flag != "-fPIC"] + machine
        for products, source, define in (("groups", "any", "-DPACK_GROUPS"), ("bytes", "bytes", "-DPACK_BYTES")):
            self.made[products] = folder / products
            sources = [FOLDER / f"ops_{source}.cpp", Path(__file__).with_name("emulated.cpp")]
            command = [COMPILER, *flags, "-Werror", "-static", f"-I{VECTORS}", f"-I{FOLDER}", "-DELEMENT=float", define]
            subprocess.run([*command, *map(str, sources), "-o", str(self.made[products])], check=True)

    def product(self, products: str, weight: Quantized | Scaled, x: Tensor) -> Tensor:
        in_blocks = isinstance(weight, Quantized)
        codes, scales = (weight.blocks, b"") if in_blocks else (weight.codes, weight.scales.numpy())
        parts = [bytes(codes.numpy()), bytes(scales), bytes(x.numpy())]
        sizes = struct.pack("<6q", *weight.shape, KINDS[weight.kind], len(x), len(parts[0]), len(parts[1]))
        command = [EMULATOR, "-cpu", PROCESSORS[self.level], str(self.made[products])]
        done = subprocess.run(command, input=b"".join([sizes, *parts]), capture_output=True, check=True)
        return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(len(x), -1)


@pytest.fixture(scope="module")
def all_levels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Programs]:
    return {level: Programs(level, tmp_path_factory.mktemp(level)) for level in PROCESSORS}


@pytest.fixture(params=PROCESSORS)
def programs(request: pytest.FixtureRequest, all_levels: dict[str, Programs]) -> Programs:
    return all_levels[request.param]


@pytest.mark.parametrize("rows", [1, 21])
@pytest.mark.parametrize("kind", BLOCKS)
def test_groups(programs: Programs, kind: str, rows: int) -> None:
    factor, group = 1 / in_groups.LARGEST[kind], in_groups.GROUPS[kind]
    weight, w = in_groups.matrix(kind, 37, 768 // BLOCKS[kind][0], rows, torch.float32, factor)
    x = in_groups.rows_of(rows, 768, group=group, seed=1, dtype=torch.float32)
    in_groups.check(programs.product("groups", weight, x), x, w, group)


@pytest.mark.parametrize("rows", [1, 21])
@pytest.mark.parametrize("kind", SHARED)
def test_bytes(programs: Programs, kind: str, rows: int) -> None:
    weight, w = in_bytes.matrix(kind, 37, 800, rows, torch.float32)
    x = in_bytes.rows_for(kind, rows, 800, 1, torch.float32)
    in_bytes.check_product(programs.product("bytes", weight, x), x, w, kind)


@pytest.mark.parametrize("kind", ["q8_0", "int8"])
def test_the_largest_codes_and_weights_are_exact(programs: Programs, kind: str) -> None:
    """Every product is the largest one, of either sign: 16 bits hold it, and 32 bits the sums."""
    weight, w = extreme(kind, 5, 512)
    x = torch.tensor([1.0, -1.0, 0.5]).repeat_interleave(512).view(3, 512)
    expected = x.double() @ w.T
    assert (programs.product("bytes" if kind == "int8" else "groups", weight, x).double() - expected).abs().max() < 1e-3


def extreme(kind: str, outputs: int, inputs: int) -> tuple[Quantized | Scaled, Tensor]:
    """A matrix of -128 and 127 in turns of outputs, with the scale 2^-10, and the same in float64."""
    codes = torch.tensor([-128, 127], dtype=torch.int8).repeat(outputs)[:outputs, None].expand(outputs, inputs)
    exact, scale = codes.double() / 1024, 1 / 1024
    if kind == "int8":
        as_bytes = codes.contiguous().view(torch.uint8)
        return Scaled(kind, as_bytes, torch.full((outputs, 1), scale), torch.float32), exact
    blocks = codes.contiguous().view(torch.uint8).view(outputs, inputs // 32, 32)
    scales = torch.full((outputs, inputs // 32, 1), scale, dtype=torch.float16).view(torch.uint8)
    return Quantized(kind, torch.cat([scales, blocks], 2).view(outputs, -1), torch.float32), exact


def test_levels_compute_the_same_numbers(all_levels: dict[str, Programs]) -> None:
    """Integer sums are exact, however they are made."""
    for kind in ("q4_0", "q6_k", "q8_0"):
        weight, _ = in_groups.matrix(kind, 37, 768 // BLOCKS[kind][0], 9, torch.float32, 1 / in_groups.LARGEST[kind])
        x = in_groups.rows_of(9, 768, group=in_groups.GROUPS[kind], seed=1, dtype=torch.float32)
        first, second = (each.product("groups", weight, x) for each in all_levels.values())
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


def test_only_one_level_has_products_of_quads(all_levels: dict[str, Programs]) -> None:
    """sdot in the code of one, none in the other's."""
    has = {}
    for level, programs in all_levels.items():
        listing = [DISASSEMBLER, "-d", "--no-show-raw-insn", str(programs.made["groups"])]
        has[level] = "\tsdot\t" in subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    assert has == {"neon": False, "neon_dotprod": True}


def test_a_cpu_has_the_levels_of_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/cpuinfo of an ARM CPU names what the kernel found in HWCAP."""
    for more, expected in ((set(), ["neon"]), ({"asimddp", "atomics"}, ["neon_dotprod", "neon"])):
        features = frozenset({"fp", "asimd", "crc32"} | more)
        monkeypatch.setattr("attention.cpu.level.cpu_features", lambda features=features: features)
        assert levels_here() == expected
