"""Copies between the memory of two processes."""

from __future__ import annotations

import ctypes
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from net.errors import TransferError
from net.transfer.cma.process import IOV_MAX, Offer, OtherProcess, Word
from net.transfer.common.transport import Op, Unusable

ROOT = Path(__file__).resolve().parents[4]
NBYTES = 1 << 20

OTHER = f"""
import ctypes, json, sys
from net.transfer.cma.process import Word
word, memory = Word(), ctypes.create_string_buffer({NBYTES})
print(json.dumps([*word.offer(), ctypes.addressof(memory)]), flush=True)
for line in sys.stdin:
    if line == "step\\n":
        word.step()
    print(json.dumps(memory.raw.hex() if line == "show\\n" else word.count), flush=True)
"""


class Other:
    """Another process with a megabyte."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        *offer, self.address = self.line()
        self.offer = Offer(*offer)

    def line(self):
        return json.loads(self.process.stdout.readline())

    def ask(self, question: str):
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self.line()


@pytest.fixture
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.process.kill()
    made.process.communicate()


def test_more_moves_than_one_call_takes(other):
    seed = 3
    print(f"seed {seed}")
    chance = random.Random(seed)
    process = OtherProcess.of(other.offer)
    source, target = ctypes.create_string_buffer(NBYTES), ctypes.create_string_buffer(NBYTES)
    source.raw = chance.randbytes(NBYTES)
    here, there = ctypes.addressof(source), ctypes.addressof(target)
    length = NBYTES // (2 * IOV_MAX + 3)
    order = list(range(2 * IOV_MAX + 3))
    chance.shuffle(order)
    moves = [(here + i * length, other.address + j * length, length) for i, j in enumerate(order)]
    process.move(Op.WRITE, moves)
    process.move(Op.READ, [(there + (a - here), b, n) for a, b, n in moves])
    assert target.raw[: length * len(order)] == source.raw[: length * len(order)]
    theirs = bytes.fromhex(other.ask("show"))
    assert all(
        theirs[j * length : (j + 1) * length] == source.raw[i * length : (i + 1) * length] for i, j in enumerate(order)
    )


def test_the_word_counts_changes_and_names_the_process(other):
    process = OtherProcess.of(other.offer)
    assert process.count() == 0
    assert (other.ask("step"), process.count()) == (1, 1)
    own = Word()
    with pytest.raises(Unusable, match="another one by now"):
        OtherProcess.of(other.offer._replace(proof=own.offer().proof))
    with pytest.raises(Unusable, match="another one by now"):
        OtherProcess.of(own.offer()._replace(proof=other.offer.proof))
    assert OtherProcess.of(own.offer()).count() == 0
    with pytest.raises(Unusable, match="another host"):
        OtherProcess.of(other.offer._replace(boot="elsewhere"))
    for memfd in (0, 999):  # its standard input is a pipe
        with pytest.raises(Unusable, match="unreachable"):
            OtherProcess.of(other.offer._replace(memfd=memfd))
    other.process.kill()
    other.process.wait()
    with pytest.raises(TransferError, match="has ended"):
        process.count()
    with pytest.raises(OSError, match="No such process"):
        process.move(Op.READ, [(ctypes.addressof(ctypes.create_string_buffer(8)), other.address, 8)])
    with pytest.raises(Unusable, match="unreachable"):
        OtherProcess.of(other.offer)


def test_memory_that_is_not_mapped_is_an_error(other):
    process = OtherProcess.of(other.offer)
    memory = ctypes.create_string_buffer(100)
    here = ctypes.addressof(memory)
    for moves in ([(here, 64, 10)], [(here, other.address, 10), (here, 64, 10)]):
        with pytest.raises(OSError, match="Bad address"):
            process.move(Op.READ, moves)
