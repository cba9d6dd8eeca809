"""The first step of the quick reference grid at which the Triton backend is wrong in the interpreter: a line of JSON.

In float32, for scripts/tools.py mutants; lab/mutants/first_fault.py is the same for the CPU backend.
"""

from __future__ import annotations

import json
import sys

import torch

from tests.attention.interpreted import shim

shim.install()

from attention.triton.backend import TritonBackend  # noqa: E402
from lab.bench.attention.grid import find_fault, points, sink_points  # noqa: E402


def first_fault() -> tuple[str, str] | None:
    """(step, fault); None = right everywhere."""
    backend = TritonBackend()
    for point in (*points(quick=True), *sink_points()):
        if point.dtype == torch.float32 and (fault := find_fault(backend, point)):
            return str(point), fault
    return None


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    json.dump(first_fault(), sys.stdout)
