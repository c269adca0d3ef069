"""An app with a store of starts, for a process of its own or for this one. `kill` takes its process with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import holdfast
from tests.consume.brokers import QUEUE


def make_app(url: str, done: str | Path, store: Path | str, *, management: str | None = None) -> holdfast.App:
    """One at a time, four held: what is begun is known, and what is merely held too."""
    app = holdfast.App(url, management=management, store=f"sqlite:///{store}")

    @app.consumer(QUEUE, retry=holdfast.Retry(attempts=2, delay="100ms"), concurrency=1, prefetch=4)
    async def handle(message: holdfast.Message) -> None:
        # One write a line: what the process did is there, whatever ends it.
        file = os.open(done, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b"%s %d\n" % (message.body, message.attempt))
        os.close(file)
        if message.body.startswith(b"kill"):
            os.kill(os.getpid(), signal.SIGKILL)

    return app


if "TEST_STORE" in os.environ:
    app = make_app(os.environ["TEST_URL"], os.environ["TEST_DONE"], os.environ["TEST_STORE"])
