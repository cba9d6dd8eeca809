"""Imports torch in threads, next to the import of a node's other modules and to what a start waits for.

The import of torch costs 0.8 s of CPU time. For 0.15 s of these the dynamic linker relocates libtorch_cpu.so and runs
its constructors, which need no interpreter. `begin_library` does this in a thread that does not hold the interpreter
lock, while Python imports our modules; Python's own dlopen holds the lock. The remainder is Python code: a second
thread imports it and the engine (`begin_engine`), next to what needs no lock or waits: the tokenizer, the network, and
a cluster that is only starting. A node that refuses its flags does not wait
for these threads (net/loop/leaving.py).
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from net.loop.leaving import may_be_left

LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_cpu.so", ctypes.RTLD_LOCAL))
"""In the order and with the visibility that torch/__init__.py gives them."""

RTLD_NOW = 2  # of dlfcn.h


def begin_library() -> Thread | None:
    """Load torch's library in a thread; None if torch is imported already, or is not installed. Set the variables that
    OpenMP reads before this."""
    if "torch" in sys.modules or (found := find_spec("torch")) is None or found.origin is None:
        return None
    return _begun(Thread(target=load, args=(Path(found.origin).parent / "lib",), name="torch library"))


def begin_engine() -> Thread:
    """Import torch and the engine in a thread. Who imports them meanwhile waits for its end, and gets its error."""
    return _begun(Thread(target=_import_engine, name="torch import"))


def load(folder: Path) -> list[str]:
    """Load torch's libraries in `folder`, and return their names. Those that are not there, or cannot be loaded, are
    left to the import of torch, which says what is wrong."""
    dlopen = ctypes.CDLL(None).dlopen  # ctypes gives up the lock for a call
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    return [name for name, visible in LIBRARIES if dlopen(bytes(folder / name), RTLD_NOW | visible)]


def _begun(thread: Thread) -> Thread:
    may_be_left(thread)
    thread.start()
    return thread


def _import_engine() -> None:
    with suppress(Exception):  # the thread that loads the model meets it, too
        import_module("engine.node.engine")
