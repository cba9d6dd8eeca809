"""The first step of the quick reference grid at which the CPU backend of this checkout is wrong: one line of JSON."""

from __future__ import annotations

import json
import sys

import torch

from attention.choice.choose import made
from attention.codes import DTYPES
from attention.delta_states import rule_of
from lab.bench.attention.delta_grid import find_delta_fault
from lab.bench.attention.delta_grid import points as delta_points
from lab.bench.attention.grid import find_fault, points, sink_points
from lab.bench.attention.quantized import find_quantized_fault

THREADS = 2  # one thread never splits a context


def first_fault() -> tuple[str, str] | None:
    """(step, fault); None = right everywhere."""
    backend = made("cpu")
    for point in (*points(quick=True), *sink_points()):
        if fault := find_fault(backend, point):
            return str(point), fault
    for kv_dtype in DTYPES:
        for point in list(points(quick=True))[::3]:
            if fault := find_quantized_fault(backend, point, kv_dtype):
                return f"{point}, KV in {kv_dtype}", fault
    for delta_point in delta_points(quick=True):
        if fault := find_delta_fault(rule_of(backend), delta_point):
            return str(delta_point), fault
    return None


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.set_num_threads(THREADS)
    json.dump(first_fault(), sys.stdout)
