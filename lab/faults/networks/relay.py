"""A slow link between two TAP devices in user space: delay, rate and cuts, for kernels without netem. Linux, root.

    python -m lab.faults.networks.relay DEVICE DEVICE DELAY_MS MBIT

Each line on standard input is a command, and each gets a line of JSON in answer:

    cut, heal    drop all frames, or none
    bytes        bytes that have left each device for the other one

It queues up to 50 ms of traffic in each direction and drops what exceeds that, like a router with a short queue.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 65_536
QUEUE_S = 0.05


class Way:
    """One direction: frames leave at `rate` bytes/s and arrive `delay_s` later. Pure."""

    def __init__(self, delay_s: float, rate: float) -> None:
        self._delay_s, self._rate = delay_s, rate
        self._free_at = 0.0  # when the last accepted frame has left
        self._flying: deque[tuple[float, bytes]] = deque()
        self.sent_bytes = 0

    def offer(self, now: float, frame: bytes) -> None:
        """Accept or drop a frame."""
        begin = max(self._free_at, now)
        if begin - now > QUEUE_S:
            return
        self._free_at = begin + len(frame) / self._rate
        self.sent_bytes += len(frame)
        self._flying.append((self._free_at + self._delay_s, frame))

    def due(self, now: float) -> list[bytes]:
        """Frames that have arrived."""
        arrived = []
        while self._flying and self._flying[0][0] <= now:
            arrived.append(self._flying.popleft()[1])
        return arrived

    def next_s(self, now: float) -> float:
        """Seconds until a frame arrives; at most 1."""
        return min(1.0, max(0.0, self._flying[0][0] - now)) if self._flying else 1.0


def opened(name: str) -> int:
    """The TAP device of that name, made if it is missing. Raises OSError."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    os.set_blocking(device, False)
    return device


def main() -> None:
    first, second = (opened(name) for name in sys.argv[1:3])
    delay_s, rate = float(sys.argv[3]) / 1e3, float(sys.argv[4]) * 1e6 / 8
    ways = {first: Way(delay_s, rate), second: Way(delay_s, rate)}
    onto, commands, cut = {first: second, second: first}, sys.stdin.fileno(), False
    print(json.dumps({"ready": True}), flush=True)
    while True:
        now = time.monotonic()
        wait_s = min(way.next_s(now) for way in ways.values())
        for ready in select.select([first, second, commands], [], [], wait_s)[0]:
            if ready != commands:
                try:
                    frame = os.read(ready, FRAME_BYTES)
                except OSError:  # the device is not up yet
                    time.sleep(0.01)
                    continue
                if not cut:
                    ways[ready].offer(time.monotonic(), frame)
                continue
            command = sys.stdin.readline().strip()
            if not command:
                return
            cut = {"cut": True, "heal": False}.get(command, cut)
            print(json.dumps([way.sent_bytes for way in ways.values()]), flush=True)
        now = time.monotonic()
        for device, way in ways.items():
            for frame in way.due(now):
                if not cut:
                    try:
                        os.write(onto[device], frame)
                    except OSError:  # the device is not up yet, or its queue is full: the frame is lost
                        continue


if __name__ == "__main__":
    main()
