"""Ports for the servers that tests start, which nobody else on the machine takes between two starts of a server.

The kernel gives ports of its own range to everybody who connects to anything: one that a server has left for a moment,
or has not taken yet, may be gone. So these are below that range, and each belongs to this process until it ends.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

FIRST = 10_000
TRIES_COUNT_MAX = 10_000
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_ours: list[socket.socket] = []  # names that two processes cannot have at once; the kernel takes them back at our end


def free_port() -> int:
    """A port that nobody uses, and that no other run of the tests gets."""
    last = int(RANGE.read_text().split()[0]) - 1 if RANGE.exists() else 32_767
    for _ in range(TRIES_COUNT_MAX):
        port = random.SystemRandom().randint(FIRST, last)  # not what hypothesis or randomly has sown
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0holdfast-test-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            name.close()
        else:
            _ours.append(name)
            return port
    raise RuntimeError(f"no free port between {FIRST} and {last}")


def free_ports(count: int) -> list[int]:
    """So many of them."""
    return [free_port() for _ in range(count)]
