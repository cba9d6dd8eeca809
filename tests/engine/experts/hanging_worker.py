"""The process of a rank that beats and does not answer while the file that HANGS_WHILE names exists.

Not a test: in place of engine.experts.worker.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from engine.experts import worker
from engine.experts.work import Work

do = Work.do


def hang_and_do(self: Work, head: list[int]) -> None:
    while Path(os.environ["HANGS_WHILE"]).exists():
        time.sleep(0.02)
    do(self, head)


if __name__ == "__main__":
    Work.do = hang_and_do  # type: ignore[method-assign]
    sys.exit(worker.main(int(sys.argv[1])))
