"""Puts this checkout first on the path: before the standard library, which also has a module named `sched`.

Every command of this folder imports it first, so that it runs from any folder, installed or not. Nothing else in the
checkout edits `sys.path`, except mooncake.py, which is installed without this folder.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT))
