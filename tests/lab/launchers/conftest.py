"""What the launchers' tests measure goes into one file per session."""

from __future__ import annotations

from tests.lab.launchers.told import told

__all__ = ["told"]
