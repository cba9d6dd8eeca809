"""Products of quantized weights for aarch64 (level neon): compiled by the cross compiler, run in qemu-user, against
float64. Shapes are few: qemu is slow, and test_quantized.py and test_byte_weights.py test what the levels share."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention.cpu import build as cpu_build
from engine.model.ops.cpu import FLAGS, FOLDER, KINDS, VECTORS
from engine.model.ops.quantized import BLOCKS, SHARED, Quantized, Scaled
from tests.attention.emulated import COMPILER, EMULATOR, MISSING
from tests.engine.model.ops import test_byte_weights as in_bytes
from tests.engine.model.ops import test_quantized as in_groups

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not on PATH: {', '.join(MISSING)} (Debian: apt install g++-aarch64-linux-gnu qemu-user)"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The kernels of groups and those of bytes, each in a program."""
    folder, made = tmp_path_factory.mktemp("neon"), {}
    flags = [flag for flag in (*cpu_build.FLAGS, *FLAGS) if flag != "-fPIC"]
    for products, source, define in (("groups", "any", "-DPACK_GROUPS"), ("bytes", "bytes", "-DPACK_BYTES")):
        made[products] = folder / products
        sources = [FOLDER / f"ops_{source}.cpp", Path(__file__).with_name("emulated.cpp")]
        command = [COMPILER, *flags, "-Werror", "-static", f"-I{VECTORS}", f"-I{FOLDER}", "-DELEMENT=float", define]
        subprocess.run([*command, *map(str, sources), "-o", str(made[products])], check=True)
    return made


def product(program: Path, weight: Quantized | Scaled, x: Tensor) -> Tensor:
    codes, scales = (weight.blocks, b"") if isinstance(weight, Quantized) else (weight.codes, weight.scales.numpy())
    parts = [bytes(codes.numpy()), bytes(scales), bytes(x.numpy())]
    sizes = struct.pack("<6q", *weight.shape, KINDS[weight.kind], len(x), len(parts[0]), len(parts[1]))
    done = subprocess.run([EMULATOR, str(program)], input=b"".join([sizes, *parts]), capture_output=True, check=True)
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(len(x), -1)


@pytest.mark.parametrize("rows", [1, 21])
@pytest.mark.parametrize("kind", BLOCKS)
def test_groups(programs: dict[str, Path], kind: str, rows: int) -> None:
    factor, group = 1 / in_groups.LARGEST[kind], in_groups.GROUPS[kind]
    weight, w = in_groups.matrix(kind, 37, 768 // BLOCKS[kind][0], rows, torch.float32, factor)
    x = in_groups.rows_of(rows, 768, group=group, seed=1, dtype=torch.float32)
    in_groups.check(product(programs["groups"], weight, x), x, w, group)


@pytest.mark.parametrize("rows", [1, 21])
@pytest.mark.parametrize("kind", SHARED)
def test_bytes(programs: dict[str, Path], kind: str, rows: int) -> None:
    weight, w = in_bytes.matrix(kind, 37, 800, rows, torch.float32)
    x = in_bytes.rows_for(kind, rows, 800, 1, torch.float32)
    in_bytes.check_product(product(programs["bytes"], weight, x), x, w, kind)
