"""Triton reads TRITON_INTERPRET when a kernel is decorated, so interpreted and compiled kernels cannot share a process:
test_triton_interpreted.py runs the directory `interpreted` in a process of its own, with 1; scripts/tools.py
gpu-check runs it on a GPU, with 0."""

from __future__ import annotations

import os

collect_ignore = [] if "TRITON_INTERPRET" in os.environ else ["interpreted"]
