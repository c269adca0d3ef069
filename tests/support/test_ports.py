"""A port of a test is nobody else's: not another process's, and none that the kernel gives to whoever connects."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.support.ports import RANGE, free_port, free_ports


def test_ports_are_outside_the_range_of_those_who_connect() -> None:
    first = int(RANGE.read_text().split()[0])
    assert all(port < first for port in free_ports(20))


def test_nobody_gets_a_port_twice() -> None:
    script = "from tests.support.ports import free_ports; print(*free_ports(200)); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        taken = other.stdout.readline().split()
        ours = free_ports(200)
        other.communicate("\n")
    assert len({*map(int, taken), *ours}) == 400


def test_a_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[0] == "127.0.0.1"
