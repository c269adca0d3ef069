"""The apps of the kill tests, for a process of their own or for this one. A body says what its handler does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import holdfast
from holdfast.ports.broker import Layout
from tests.consume.brokers import QUEUE
from tests.support.forking import note


def make_app(url: str, done: str | Path, layout: Layout = "per-consumer") -> holdfast.App:
    """`ok` works, `again` works at its second attempt, `bad` is permanent, `fail` never works."""
    app = holdfast.App(url)

    @app.consumer(QUEUE, retry=holdfast.Retry(attempts=3, delay="150ms"), concurrency=2, layout=layout)
    async def handle(message: holdfast.Message) -> None:
        if message.body.startswith(b"bad"):
            raise holdfast.Permanent("bad")
        if message.body.startswith(b"fail") or (message.body.startswith(b"again") and message.attempt == 1):
            raise ValueError("not yet")
        note(done, message.body)

    return app


def make_starting_app(url: str, done: str | Path, store: Path | str, *, management: str | None = None) -> holdfast.App:
    """With a store of starts. One at a time, four held: what is begun is known, and what is merely held too. `kill`
    takes its process with it."""
    app = holdfast.App(url, management=management, store=f"sqlite:///{store}")

    @app.consumer(QUEUE, retry=holdfast.Retry(attempts=2, delay="100ms"), concurrency=1, prefetch=4)
    async def handle(message: holdfast.Message) -> None:
        note(done, b"%s %d" % (message.body, message.attempt))
        if message.body.startswith(b"kill"):
            os.kill(os.getpid(), signal.SIGKILL)

    return app


if url := os.environ.get("TEST_URL"):
    done, store = os.environ["TEST_DONE"], os.environ.get("TEST_STORE")
    layout: Layout = "quorum" if os.environ.get("TEST_LAYOUT") == "quorum" else "per-consumer"
    app = make_starting_app(url, done, store) if store else make_app(url, done, layout)
