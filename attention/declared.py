"""Capabilities that a backend declares as attributes of its class, beyond what every backend must do."""

from __future__ import annotations

from attention.interface import AttentionBackend


def reads_codes(backend: AttentionBackend) -> bool:
    """Whether the backend declares `reads_codes = True`. A class that overrides how to write or attend must declare it
    again, because an inherited value refers to the kernels that it has replaced."""
    return _declares(backend, "reads_codes", ("attend", "write_kv", "rotate_and_write_kv"))


def by_address(backend: AttentionBackend) -> bool:
    """Whether the backend declares `by_address = True`, as `reads_codes`: block b is at the pool's address + b strides,
    whether or not the tensor reaches so far (engine/step/one_space.py)."""
    return _declares(backend, "by_address", ("attend", "write_kv", "rotate_and_write_kv"))


def takes_sinks(backend: AttentionBackend) -> bool:
    """Whether the backend declares `takes_sinks = True`; as `reads_codes`, again in a class that overrides attend.

    Its `attend` takes `sinks` [num_heads] too: of each head, one more score of every row, whose key has no value. It is
    neither scaled nor capped. Models without sinks do not pass it."""
    return _declares(backend, "takes_sinks", ("attend",))


def _declares(backend: AttentionBackend, what: str, kernels: tuple[str, ...]) -> bool:
    if not getattr(backend, what, False):
        return False
    classes = type(backend).__mro__

    def depth(name: str) -> int:
        return next((i for i, one in enumerate(classes) if name in vars(one)), len(classes))

    return what in getattr(backend, "__dict__", {}) or depth(what) <= min(map(depth, kernels))
