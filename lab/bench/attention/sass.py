"""The main loops of a compiled kernel, counted in the machine's own instructions.

PTX does not show everything: the assembler may put a wait behind every wgmma. Triton brings NVIDIA's disassembler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"

LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(@\S+\s+)?(\S+)(.*)")
BRANCH = re.compile(r"`\((\.L_x_\d+)\)")
WGMMA = re.compile(r"HGMMA\.64x(\d+)x(\d+)")
MMA = re.compile(r"HMMA\.16816")


@dataclass(frozen=True, slots=True)
class Loop:
    """One turn of an innermost loop with matrix products, per warp."""

    instructions: int
    products: int  # wgmma or mma
    operations: int  # multiplications and additions of the products; of a wgmma, the warp's quarter
    special: int  # of the unit for exponentials
    waits: int  # for wgmma
    barriers: int


def loops_of(cubin: bytes) -> list[Loop]:
    """In the order of the code. Raises CalledProcessError if the disassembler refuses."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.cubin")
        source.write_bytes(cubin)
        done = subprocess.run([DISASSEMBLER, "-c", source], capture_output=True, text=True, check=True)
    return list(parsed(done.stdout))


def parsed(text: str) -> Iterator[Loop]:
    """The loops of a disassembly: from a label to the last branch back to it, without a loop of products inside. A jump
    back without a condition is the end of a wait that is kept out of the loop."""
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append((found[2], found[3] if found[1] else ""))
    ends: dict[int, int] = {}
    for at, (name, rest) in enumerate(code):
        target = BRANCH.search(rest) if name.startswith("BRA") else None
        if target and labels.get(target[1], at + 1) <= at:
            ends[labels[target[1]]] = at
    whole = [(start, end) for start, end in ends.items() if any(operations(name) for name, _ in code[start : end + 1])]
    for start, end in sorted(whole):
        if not any(start <= a and b <= end and (a, b) != (start, end) for a, b in whole):
            yield counted([name for name, _ in code[start : end + 1]])


def counted(names: list[str]) -> Loop:
    return Loop(
        instructions=len(names),
        products=sum(operations(name) > 0 for name in names),
        operations=sum(map(operations, names)),
        special=sum(name.startswith("MUFU") for name in names),
        waits=sum(name.startswith("WARPGROUP.DEPBAR") for name in names),
        barriers=sum(name.startswith("BAR") for name in names),
    )


def operations(name: str) -> int:
    """Of one warp: a wgmma is the work of four."""
    if wgmma := WGMMA.match(name):
        return 2 * 64 * int(wgmma[1]) * int(wgmma[2]) // 4
    return 2 * 16 * 8 * 16 if MMA.match(name) else 0
