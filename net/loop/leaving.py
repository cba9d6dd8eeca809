"""The end of a process that does not wait for threads whose work nobody needs any more.

An import of torch, or the load of a model with its compilers, may take minutes more. Python waits for threads at its
end, so a node that refuses its flags, or gets a signal while it loads, would go on until then.
"""

from __future__ import annotations

import os
import sys
from threading import Thread
from typing import NoReturn

_threads: list[Thread] = []


def may_be_left(thread: Thread) -> None:
    """`leave` does not wait for this thread."""
    _threads.append(thread)


def leave(code: int) -> NoReturn:
    """End this process with the exit code. If a thread that may be left is alive, the interpreter does not clean up
    either: the thread could crash in what is gone. Compilers that it runs end too."""
    if any(thread.is_alive() for thread in _threads):
        from net.compiled import abandon  # not for --help and wrong flags

        abandon()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
