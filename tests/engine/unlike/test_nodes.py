"""Unlike nodes as placement sees them: bytes of the form that travels, and the seconds of a conversion."""

from __future__ import annotations

from typing import Any

import pytest

from cache.block import BlockGeometry
from engine.config.agreement import KvBlocks, unlike
from engine.unlike.nodes import UnlikeNodes
from sched.membership.member import Member
from sched.placement.measured_links import MeasuredLinks

CLUSTER = BlockGeometry(2, 2, 64, 16, "float32")
INT8 = 68 / 256
"""Bytes of a row of 64 elements and its scale, for a byte of float32."""


def member(name: str, dtype: str = "", size: int = 16, converts: bool = True) -> Member:
    info: dict[str, Any] = {"kv": {"dtype": dtype, "block_size": size, "converts": converts}} if dtype else {}
    return Member(name, ("10.0.0.1", 1), info=info)


NODES = [member("f", "float32"), member("i", "int8"), member("w", "float32", 64), member("iw", "int8", 64), member("s")]


def test_a_hand_over_moves_the_bytes_of_its_decode_node():
    nodes = UnlikeNodes(NODES, CLUSTER)
    assert nodes.any and nodes.each == 4
    assert nodes.between("f", "f") == nodes.between("i", "s") == (1.0, False)
    assert nodes.between("f", "i") == (INT8, True) == nodes.between("f", "iw")
    assert nodes.between("i", "f") == (1.0, True)
    assert nodes.between("f", "w") == (1.0, False)
    assert nodes.between("i", "iw") == (INT8, False)
    like = UnlikeNodes([NODES[0], NODES[4]], CLUSTER)
    assert not like.any and like.each == 1
    assert UnlikeNodes([NODES[1]], CLUSTER).any, "all nodes are alike, and the pool is not"


def test_an_encoding_on_the_wire_is_for_like_nodes():
    encoded = BlockGeometry(2, 2, 64, 16, "float32", "", "int8")
    nodes = UnlikeNodes(NODES, encoded)
    assert nodes.between("f", "f") == (1.0, False)
    assert nodes.between("f", "w")[0] == pytest.approx(encoded.block_bytes / encoded.wire_bytes)


def test_the_time_of_a_hand_over_has_the_measured_conversion():
    links = MeasuredLinks()
    links.reported("f", 0.0, {"f": 1e9, "i": 1e9, "w": 1e9}, converts=1e8)
    before = list(links.handover_each("f", ["f", "i", "w"]))
    assert before[1] == before[3] == pytest.approx(1e-9)
    links.forms = UnlikeNodes(NODES, CLUSTER)
    assert list(links.handover_each("f", ["f", "i", "w"]))[1::2] == pytest.approx([1e-9, INT8 * 11e-9, 1e-9])
    links.forget("f")
    assert links.handover_each("f", ["i"])[1] == pytest.approx(INT8 * links.handover_each("f", ["f"])[1])


def test_nodes_that_cannot_convert_need_like_blocks():
    gpu, other = KvBlocks("float32", 16, False), KvBlocks("int8", 64, True)
    assert unlike(None, other) is unlike(gpu, None) is unlike(gpu, KvBlocks("float32", 16, True)) is None
    assert unlike(other, KvBlocks("float32", 16, True)) is None
    for ours, theirs in ((gpu, other), (other, gpu)):
        told = str(unlike(ours, theirs))
        assert f"--kv-cache-dtype {theirs.dtype} --block-size {theirs.block_size}" in told
