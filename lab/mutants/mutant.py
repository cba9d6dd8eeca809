"""A mutant: one wrong line of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CPU, TRITON = "cpu", "triton"
KERNELS = (CPU, TRITON)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of one file. `old` occurs in it exactly once."""

    kernel: str
    name: str
    file: str
    old: str
    new: str

    def applied(self, root: Path) -> str:
        """The file's text with the edit. Raises ValueError if the kernel has changed and the edit no longer fits."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}, wanted once")
        return text.replace(self.old, self.new)
