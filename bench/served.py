"""What `bench.pairs` measures from outside: a command with its letters on RabbitMQ, and a server under load.

Nothing of a checkout is imported: the programs are those of its environment, and RabbitMQ is asked by `pamqp` alone.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx2
import uvloop
from pamqp import commands, frame

TIMEOUT_S = 300.0
LOOK_S = 0.005
CONNECTIONS = 64
TOKEN = "the-token-of-the-bench"  # noqa: S105 - of a server that lives for a few seconds
EXCHANGE = "move"
FRAME_BYTES, CHANNELS = 131_072, 8


class Side:
    """A checkout with its environment."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root.absolute()
        self.python = self.root / ".venv" / "bin" / "python"
        self.program = self.python.with_name("holdfast")
        if not self.program.exists():
            raise SystemExit(f"{self.root} has no environment; make it:  make -C {self.root} .venv/.ready-dev")

    def env(self, folder: Path, **more: str) -> dict[str, str]:
        """Nothing of ours: neither settings nor modules."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "PYTHON"))}
        return {**clean, "XDG_STATE_HOME": str(folder / "state"), **more}

    def run(self, argv: list[str], folder: Path) -> bytes:
        """To its end, which must be a good one; its stdout."""
        done = subprocess.run(
            argv, cwd=folder, env=self.env(folder), capture_output=True, check=False, timeout=TIMEOUT_S
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.name}: {argv[:4]} ended with {done.returncode}\n{done.stderr.decode()[-2000:]}")
        return done.stdout

    def measured(self, row: str, place: Path, **given: Any) -> dict[str, float]:
        """A measurement inside of a process."""
        script = Path(__file__).with_name("measured.py")
        # -P: beside the script is a module called http.
        output = self.run([str(self.python), "-P", str(script), row, json.dumps(given)], place)
        found: dict[str, float] = json.loads(output.splitlines()[-1])
        return found

    @contextmanager
    def serving(self, url: str, folder: Path, **env: str) -> Iterator[Server]:
        """Its server; SIGTERM at the end."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            listen = f"127.0.0.1:{probe.getsockname()[1]}"
        argv = [str(self.program), "serve", "--url", url, "--listen", listen, "--log-level", "warning"]
        env = self.env(folder, HOLDFAST_ADMIN_TOKEN=TOKEN, HOLDFAST_DATA_FOLDER=str(folder), **env)
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=log) as process,
        ):
            try:
                yield Server(process.pid, f"http://{listen}")
            finally:
                process.terminate()
                process.wait(TIMEOUT_S)

    @contextmanager
    def bare(self, url: str, folder: Path, mode: str) -> Iterator[Server]:
        """Its application as `bench/http.py` has it, that stores or answers without storing."""
        script = self.root / "bench" / "http_server.py"
        token = script.read_text().split('TOKEN = "')[1].split('"')[0]
        argv = [str(self.python), "-m", "bench.http_server", url, mode]
        with subprocess.Popen(argv, cwd=self.root, env=self.env(folder), stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield Server(process.pid, f"http://127.0.0.1:{int(process.stdout.readline())}", token)
            finally:
                process.terminate()
                process.wait(TIMEOUT_S)


class Server:
    """A running one."""

    def __init__(self, pid: int, address: str, token: str = TOKEN) -> None:
        self.pid = pid
        self.address = address
        self.token = token
        self.http = httpx2.Client(
            base_url=address, headers={"authorization": f"Bearer {token}"}, timeout=TIMEOUT_S, trust_env=False
        )
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx2.HTTPError):
                if self.http.get("/health").status_code == 200:
                    return
            time.sleep(LOOK_S)
        raise RuntimeError("the server did not start")

    def ask(self, method: str, path: str, body: object = None, **query: Any) -> Any:
        """The JSON of an answer, which must be a good one."""
        answer = self.http.request(method, path, json=body, params=query)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:500]}")
        return answer.json()

    @property
    def cpu_s(self) -> float:
        """Processor time of its process."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- RabbitMQ -----------------------------------------------------------------------------------------------------


class Broker:
    """A connection that declares and counts."""

    def __init__(self, port: int, vhost: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._file = self._socket.makefile("rb")
        self._socket.sendall(b"AMQP\0\0\x09\x01")
        self._read()
        self._call(0, commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"))
        self._send(0, commands.Connection.TuneOk(CHANNELS, FRAME_BYTES, 0))
        self._call(0, commands.Connection.Open(vhost))
        self._call(1, commands.Channel.Open())

    def queue(self, name: str, kind: str) -> None:
        """A durable queue, bound by its own name."""
        self._call(1, commands.Exchange.Declare(exchange=EXCHANGE, exchange_type="direct", durable=True))
        self._call(1, commands.Queue.Declare(queue=name, durable=True, arguments={"x-queue-type": kind}))
        self._call(1, commands.Queue.Bind(queue=name, exchange=EXCHANGE, routing_key=name))

    def count(self, queue: str) -> int:
        """How many messages are ready in it."""
        answer = self._call(1, commands.Queue.Declare(queue=queue, passive=True))
        return int(answer.message_count)

    def close(self) -> None:
        """Let go of it."""
        self._file.close()
        self._socket.close()

    def _call(self, channel: int, method: Any) -> Any:
        self._send(channel, method)
        return self._read()

    def _send(self, channel: int, method: Any) -> None:
        self._socket.sendall(frame.marshal(method, channel))

    def _read(self) -> Any:
        head = self._file.read(7)
        _, _, found = frame.unmarshal(head + self._file.read(int.from_bytes(head[3:7], "big") + 1))
        if isinstance(found, commands.Channel.Close | commands.Connection.Close):
            raise RuntimeError(f"the broker said no: {found.reply_text}")
        return found


def write_letters(file: Path, count: int) -> None:
    """Dead letters with a body of 512 B, as a backup of `holdfast recover` has them."""
    death: dict[str, Any] = {
        "count": 1,
        "reason": "rejected",
        "queue": "orders.validate",
        "exchange": "orders",
        "routing-keys": ["orders.created"],
    }
    headers: Any = {"MessageType": "order.created", "x-death": [death], "x-first-death-queue": "orders.validate"}
    body = base64.b64encode(os.urandom(512)).decode()
    with file.open("w") as lines:
        for number in range(count):
            name = f"{number:032x}"
            raw = commands.Basic.Properties(
                content_type="application/json", headers=headers, delivery_mode=2, correlation_id=name, message_id=name
            ).marshal()
            line = {
                "exchange": "",
                "routing_key": "dead",
                "properties": base64.b64encode(raw).decode(),
                "body": body,
                "message_id": name,
            }
            lines.write(json.dumps(line) + "\n")


class Run:
    """One `holdfast recover`, watched from outside: when its letters arrive, what it costs."""

    def __init__(self, side: Side, argv: list[str], folder: Path) -> None:
        self.started_s = self.ended_s = self.cpu_s = self.peak_mb = 0.0
        with (folder / "errors").open("wb") as errors, (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(argv, cwd=folder, env=side.env(folder), stdout=output, stderr=errors)
        self._errors = folder / "errors"
        self._status = Path(f"/proc/{self._process.pid}/status")

    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        """To its end, which must be a good one."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            look()
            with contextlib.suppress(OSError, IndexError, ValueError):
                self.peak_mb = int(self._status.read_text().split("VmHWM:")[1].split()[0]) / 1024
            ended, status, used = os.wait4(self._process.pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                os.kill(self._process.pid, signal.SIGKILL)
            time.sleep(LOOK_S)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_s = used.ru_utime + used.ru_stime
        if self._process.returncode != 0:
            raise RuntimeError(f"recover ended with {self._process.returncode}\n{self._errors.read_text()[-2000:]}")


def recovered(side: Side, broker: Broker, url: str, pair: Sequence[str], count: int, folder: Path) -> Run:
    """All letters from one queue to another; `ended_s - started_s` is from the first to the last arrival."""
    source, target = pair
    argv = [str(side.program), "recover", url, source, "--to", f"exchange={EXCHANGE},key={target}", "--json"]
    run = Run(side, argv, folder)

    def look() -> None:
        if not run.ended_s:
            found, now_s = broker.count(target), time.perf_counter()
            run.started_s = run.started_s or (now_s if found else 0.0)
            run.ended_s = now_s if found >= count else 0.0

    run.wait(look)
    look()
    if not run.ended_s:
        raise RuntimeError(f"{broker.count(target)} of {count} letters arrived")
    return run


# --- HTTP ---------------------------------------------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """Sends the same request again and again; an answer has a content length, and is what follows the last one."""

    def __init__(self, request: bytes, load: _Load) -> None:
        self._request = request
        self._load = load
        self._got = b""
        self._asked_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own
        self._ask()

    def _ask(self) -> None:
        self._asked_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, blank, body = self._got.partition(b"\r\n\r\n")
        if not blank or len(body) < int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]):
            return
        self._got = b""
        if self._load.answered(head.startswith(b"HTTP/1.1 200"), self._asked_s):
            self._ask()
        else:
            self._transport.close()


class _Load:
    def __init__(self, seconds: float) -> None:
        self.count = self.refused = 0
        self.until_s = time.perf_counter() + seconds
        self.took_s: list[float] = []

    def answered(self, is_good: bool, asked_s: float) -> bool:
        now_s = time.perf_counter()
        self.count += is_good
        self.refused += not is_good
        self.took_s.append(now_s - asked_s)
        return now_s < self.until_s


async def _loaded(port: int, request: bytes, seconds: float, connections: int) -> _Load:
    loop = asyncio.get_running_loop()
    load = _Load(seconds)
    for _ in range(connections):
        await loop.create_connection(lambda: _Connection(request, load), "127.0.0.1", port)
    await asyncio.sleep(seconds + 0.2)
    if load.refused:
        raise RuntimeError(f"the server refused {load.refused} requests")
    return load


def http_rate(
    server: Server, path: str, body: Mapping[str, Any], seconds: float, units: int, connections: int = CONNECTIONS
) -> dict[str, float]:
    """So many connections; a request has so many units. The time that 99 of a hundred requests took at the most."""
    raw = json.dumps(body).encode()
    port = int(server.address.rpartition(":")[2])
    token = f"authorization: Bearer {server.token}"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{token}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw
    before_s = server.cpu_s
    load = uvloop.run(_loaded(port, request, seconds, connections))
    done, took_s = load.count * units, sorted(load.took_s)
    return {
        "rate": done / seconds,
        "cpu_us": (server.cpu_s - before_s) / done * 1e6,
        "p99_ms": took_s[len(took_s) * 99 // 100] * 1000,
    }
