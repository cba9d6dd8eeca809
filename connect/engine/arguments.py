"""Arguments of upstream's transfer calls, as ours need them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from net.transfer.cma.process import Move

END = 1 << 64  # of all addresses


def host_and_port(local_hostname: str) -> tuple[str, int]:
    """(host, port) of "HOST", "HOST:PORT" or "[IPv6]:PORT"."""
    host, colon, port = local_hostname.rpartition(":")
    if colon and port.isdigit() and (":" not in host or host.startswith("[")):
        return host.strip("[]"), int(port)
    return local_hostname.strip("[]"), 0


def one_move(local: int, remote: int, length: int) -> Sequence[Move]:
    """One move. Raises TypeError."""
    return ((index(local), index(remote), index(length)),)


def moves_of(local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> list[Move] | None:
    """Of any integers, numpy's too. None: the numbers of the three differ. Raises TypeError."""
    if not len(local) == len(remote) == len(lengths):
        return None
    return list(zip(map(index, local), map(index, remote), map(index, lengths), strict=True))


def possible_moves(moves: Sequence[Move]) -> Sequence[Move] | None:
    """Without the empty ones; None if one has an impossible address or length."""
    for local, remote, length in moves:
        if length <= 0 or local < 0 or remote < 0 or local + length > END or remote + length > END:
            break
    else:
        return moves
    left = [move for move in moves if move[2]]
    impossible = any(min(move) < 0 or max(move[:2]) > END - move[2] for move in left)
    return None if impossible else left
