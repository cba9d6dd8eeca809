"""The codes that upstream's calls answer, as far as ours do."""

from __future__ import annotations

OK = 0
INTERNAL = -1
NO_ROOM = -200
INVALID = -600
NOT_READY = -703
MISSING = -704
EXISTS = -705
TRANSFER = -800
NO_ANSWER = -900
QUOTA = -1700
