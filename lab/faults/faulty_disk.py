"""A disk of a node that fails, is full or hangs on demand: `faulty_disk.c` below LMDB and the slot file."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("faulty_disk.c")


class FaultyDisk:
    """The directory `path` for --ssd-path, and the environment `env` in which the node must run. Needs a C compiler."""

    def __init__(self, folder: Path) -> None:
        self.path, self._control, library = folder / "ssd", folder / "control", folder / "faulty.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        self._control.write_text("")
        self.env = {
            "LD_PRELOAD": str(library),
            "FAULTY_PATH": str(self.path),
            "FAULTY_CONTROL": str(self._control),
        }

    def is_wrong(self, what: str) -> None:
        """What the disk does wrong from now on, as described in `faulty_disk.c`; "" = nothing."""
        new = self._control.with_suffix(".new")
        new.write_text(what)
        new.replace(self._control)
