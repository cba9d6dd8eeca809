"""Trace files that are damaged: all of them are refused with a ValueError that says where."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from lab.loads.trace import TraceRow, read_trace, write_trace

ROW = {"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [0]}


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ValueError) as why:
        list(read_trace(path))
    return str(why.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("service_class", []), ("service_class", {}), ("service_class", 3), ("timestamp", True), ("timestamp", None)],
)
def test_values_of_another_type_name_the_line(tmp_path, name, value):
    lines = json.dumps(ROW) + "\n" + json.dumps(ROW | {name: value}) + "\n"
    assert "line 2" in refused(tmp_path / "t.jsonl", lines.encode())


def test_a_compressed_file_that_is_damaged_or_ends_early_loses_no_request_silently(tmp_path):
    path = tmp_path / "t.jsonl.xz"
    count = write_trace(path, [TraceRow(1.5 * i, 600, 3, [i, 7 * i]) for i in range(3000)])
    whole = path.read_bytes()
    assert len(list(read_trace(path))) == count
    assert "is damaged after line" in refused(path, whole[: len(whole) // 2])
    assert "is damaged after line" in refused(path, whole[:60] + b"\x55" * 8 + whole[68:])
    assert "is damaged after line 0" in refused(path, b"no xz")
    assert "is damaged after line 0" in refused(path, b"")
    path.write_bytes(lzma.compress(b""))
    assert list(read_trace(path)) == []
