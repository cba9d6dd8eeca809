"""The reasons why the lab cannot run or has failed."""

from __future__ import annotations


class NoVm(Exception):
    """This machine lacks something that the lab needs; the text says what."""


class LabError(Exception):
    """The lab ran and failed; the text says where."""
