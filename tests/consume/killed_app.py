"""The app of the kill tests, for a process of its own or for this one. How a body begins says what its handler does."""

from __future__ import annotations

import os
from pathlib import Path

import holdfast
from holdfast.ports.broker import Layout
from tests.consume.brokers import QUEUE


def make_app(url: str, done: str | Path, layout: Layout = "per-consumer") -> holdfast.App:
    """`ok` works, `again` works at its second attempt, `bad` is permanent, `fail` never works."""
    app = holdfast.App(url)

    @app.consumer(QUEUE, retry=holdfast.Retry(attempts=3, delay="150ms"), concurrency=2, layout=layout)
    async def handle(message: holdfast.Message) -> None:
        if message.body.startswith(b"bad"):
            raise holdfast.Permanent("bad")
        if message.body.startswith(b"fail") or (message.body.startswith(b"again") and message.attempt == 1):
            raise ValueError("not yet")
        # One write a line: what the process did is there, whatever ends it.
        file = os.open(done, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, message.body + b"\n")
        os.close(file)

    return app


if "TEST_URL" in os.environ:
    layout: Layout = "quorum" if os.environ.get("TEST_LAYOUT") == "quorum" else "per-consumer"
    app = make_app(os.environ["TEST_URL"], os.environ["TEST_DONE"], layout)
