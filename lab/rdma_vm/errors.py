"""The reasons why the lab cannot run or has failed."""

from __future__ import annotations


class NoVm(Exception):
    """Something the lab needs cannot be had on this machine; the text says what."""


class LabError(Exception):
    """The lab was there and failed; the text says where."""
