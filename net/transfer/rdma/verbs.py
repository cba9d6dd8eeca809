"""libibverbs for net/transfer/rdma: loaded on the first call; if it is missing, one line gives the reason."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any

from net.compiled import NotCompiled
from net.transfer.common.transport import Unusable
from net.transfer.rdma.build import module

SYSFS = Path("/sys/class/infiniband")

OP = Struct("=4Q6I")
"""kv_op: wr_id, local address, remote address, add; length, lkey, rkey, opcode, flags, unused."""

COMPLETION = Struct("=Q2I")
"""kv_completion: wr_id; status, qp_num."""


class VerbsError(OSError):
    """A verbs call failed."""


class Verbs:
    """The two halves of the cffi module. Attributes of `lib` are the names of verbs.h."""

    def __init__(self) -> None:
        loaded = module()
        self.ffi: Any = loaded.ffi
        self.lib: Any = loaded.lib
        if (OP.size, COMPLETION.size) != (self.lib.kv_sizeof_op(), self.lib.kv_sizeof_completion()):
            raise NotCompiled("the verbs module and its records have different sizes")

    def pointer(self, pointer: Any, what: str) -> Any:
        """`pointer`; raises VerbsError if it is NULL."""
        if pointer == self.ffi.NULL:
            raise VerbsError(self.ffi.errno, f"{what}: {os.strerror(self.ffi.errno)}")
        return pointer

    def check(self, error: int, what: str) -> None:
        """Raises VerbsError unless `error` is 0."""
        if error:
            number = abs(error) if abs(error) in errno.errorcode else self.ffi.errno
            raise VerbsError(number, f"{what}: {os.strerror(number)}")

    def status(self, status: int) -> str:
        """The description of a completion's status."""
        return str(self.ffi.string(self.lib.ibv_wc_status_str(status)).decode())


@cache
def verbs() -> Verbs:
    """Loaded once. Raises Unusable with the reason."""
    if not device_names():
        raise Unusable("this machine has no RDMA device (nothing in /sys/class/infiniband)")
    try:
        return Verbs()
    except NotCompiled as error:
        raise Unusable(str(error)) from None


def prepare() -> None:
    """Compile and load before the first transfer if there is a device. Blocks for a few seconds at most."""
    with suppress(Unusable):
        verbs()


def chosen_devices(wanted: Sequence[str]) -> list[str]:
    """The names of --rdma-devices, all of which are here; without any, all that are here. Raises Unusable with the
    reason if this process cannot use them."""
    verbs()
    present = device_names()
    if missing := [name for name in wanted if name not in present]:
        raise Unusable(f"this machine has no RDMA device {missing[0]!r}, only {', '.join(present)}: see --rdma-devices")
    return list(wanted) or present


def device_names() -> list[str]:
    """The kernel's RDMA devices."""
    try:
        return sorted(path.name for path in SYSFS.iterdir())
    except OSError:
        return []
