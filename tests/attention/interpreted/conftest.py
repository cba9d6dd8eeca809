"""Prepares the interpreter, if these tests run in it, before any kernel is imported."""

from __future__ import annotations

import torch

from tests.attention.interpreted.cases import DEVICE

if DEVICE == "cpu":
    from tests.attention.interpreted import shim

    shim.install()
torch.set_num_threads(1)
