"""Memory of this node that peers on this host may map: the kernel's refusal names the flag."""

from __future__ import annotations

from engine.config.fits import MiB
from engine.config.flags import UsageError
from net.transfer.common.memory import Region


def shared_memory(flag: str, name: str, nbytes: int) -> Region:
    """The region that `flag` sizes. Raises UsageError if the kernel refuses it."""
    try:
        return Region.shared(name, nbytes)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{flag} {nbytes}: the kernel refuses {nbytes // MiB} MiB ({why}); give less") from None
