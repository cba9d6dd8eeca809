"""Triton reads TRITON_INTERPRET when a kernel is decorated, so interpreted and compiled kernels cannot share a process:
test_triton_interpreted.py runs the directory `interpreted` in processes of their own."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
