"""Attention on CPUs in C++, on the paged pool itself: no gather, no copy of the context."""

from __future__ import annotations

from attention.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
