"""--peer-python: the interpreters that peers are installed in, each in its own environment."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

FLAG = "--peer-python"


def add_peer_python(parser: ArgumentParser, peers: Sequence[str], aliases: Sequence[str] = ()) -> None:
    """--peer-python [NAME=]PATH, the same in every benchmark that starts peers.

    Without a name, PATH is for all peers that have no PATH of their own. For a peer in `aliases`, --NAME-python PATH
    means --peer-python NAME=PATH.
    """
    about = f"an interpreter that has the peer NAME ({', '.join(peers)}), or all of them; repeatable"
    parser.add_argument(FLAG, type=_of(peers), action="append", default=[], metavar="[NAME=]PATH", help=about)
    for name in aliases:
        same = f"{FLAG} {name}=PATH"
        flag = f"--{name}-python"
        parser.add_argument(flag, type=_alias(name), action="append", dest="peer_python", metavar="PATH", help=same)


def python_of(args: Namespace, peer: str) -> Path | None:
    """The peer's interpreter: the last one given for it, else the last one for all, else $MOONCAKE_PEER_PYTHON."""
    named = dict(args.peer_python)
    variable = os.environ.get(f"MOONCAKE_{peer.upper().replace('-', '_')}_PYTHON")
    return named.get(peer) or named.get("") or (Path(variable) if variable else None)


def _of(peers: Sequence[str]) -> Callable[[str], tuple[str, Path]]:
    def read(text: str) -> tuple[str, Path]:
        name, found, path = text.partition("=")
        if not found:
            name, path = "", text
        if (name and name not in peers) or not path:
            raise ArgumentTypeError(f"expected PATH or NAME=PATH with NAME one of {', '.join(peers)}, got {text!r}")
        return name, Path(path)

    return read


def _alias(name: str) -> Callable[[str], tuple[str, Path]]:
    return lambda text: (name, Path(text))
