"""Over HTTP with 64 connections: produce that stores against the same server that answers without storing (wrk)."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import holdfast
from bench.http_server import TOKEN
from bench.rounds import Target, report, run

CONNECTIONS = 64
PAYLOAD = base64.b64encode(os.urandom(512)).decode()


@contextmanager
def _server(folder: Path, *, storing: bool) -> Iterator[int]:
    mode = "store" if storing else "blank"
    command = [sys.executable, "-m", "bench.http_server", f"sqlite:///{folder}/{mode}", mode]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        asyncio.run(_create(port))
        yield port
    finally:
        process.terminate()
        process.wait()


async def _create(port: int) -> None:
    async with holdfast.Client(f"http://127.0.0.1:{port}", TOKEN) as queues:
        await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")


def _wrk(port: int, folder: Path, *, batch: int, seconds: int) -> float:
    items = [{"bytes": PAYLOAD} for _ in range(batch)]
    body = json.dumps({"queue_name": "orders", "request_timeout": "1m", "items": items})
    script = folder / f"produce-{batch}.lua"
    script.write_text(
        'wrk.method = "POST"\n'
        f'wrk.headers["Authorization"] = "Bearer {TOKEN}"\n'
        'wrk.headers["Content-Type"] = "application/json"\n'
        f"wrk.body = [==[{body}]==]\n"
    )
    wrk = shutil.which("wrk")
    if wrk is None:
        raise SystemExit("wrk is missing; apt-get install wrk")
    url = f"http://127.0.0.1:{port}/v1/queue.produce"
    command = [wrk, "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script), url]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if "Non-2xx" in output:
        raise SystemExit(f"the server refused requests\n{output}")
    found = re.search(r"Requests/sec:\s+([\d.]+)", output)
    assert found is not None
    return float(found[1])


def main(*, rounds: int, quick: bool) -> bool:
    """Single items and batches of 100; returns whether every must is met."""
    seconds = 2 if quick else 4
    met = True
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        folder = Path(name)
        with _server(folder, storing=True) as storing, _server(folder, storing=False) as blank:
            for batch, must, aim in ((1, 0.6, 0.75), (100, 0.5, 0.65)):

                def at(port: int, batch: int = batch) -> float:
                    return _wrk(port, folder, batch=batch, seconds=seconds)

                rates = run(
                    f"http, {batch} an item",
                    {"storing": lambda at=at: at(storing), "not storing": lambda at=at: at(blank)},  # type: ignore[misc]
                    rounds=rounds,
                )
                title = f"HTTP produce, {batch} item(s) a request, {CONNECTIONS} connections"
                met &= report(title, rates, [Target("storing", "not storing", must, aim)])
    return met
