"""The answers of upstream's replica descriptions, for a value of our pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replica:
    """Where a value is read from now."""

    on_ssd: bool

    def is_memory_replica(self) -> bool:
        return not self.on_ssd

    def is_disk_replica(self) -> bool:
        """A shared file system, which our pool does not use."""
        return False

    def is_local_disk_replica(self) -> bool:
        """The SSD tier of a node."""
        return self.on_ssd
