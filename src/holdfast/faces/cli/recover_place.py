"""Where `holdfast recover` works: the broker and the queue that were named, or the broker of the settings."""

from __future__ import annotations

from holdfast.faces.cli.context import BadUsage, CommandContext

NAME_BYTES_MAX = 255


def find_place(session: CommandContext, url: str, dead_queue: str, *, needs_queue: bool) -> tuple[str, str]:
    """URL and queue. A URL on the command line is seen by everybody on the machine (`ps`), a variable is not."""
    if not dead_queue and url != "-" and "://" not in url:
        url, dead_queue = "", url  # the queue alone was given
    if needs_queue and not dead_queue:
        raise BadUsage("Missing argument 'DLQ'. See 'holdfast recover --help'")
    if len(dead_queue.encode("utf-8", "surrogateescape")) > NAME_BYTES_MAX:
        raise BadUsage(f"DLQ is invalid; no queue has a name of more than {NAME_BYTES_MAX} bytes")
    if url in ("", "-"):
        broker = session.settings.broker
        if broker is None:
            raise BadUsage(
                "URL is missing; set HOLDFAST_BROKER_URL, or give amqp://… or sqlite:///FOLDER before the DLQ"
            )
        url = broker.reveal()
    return url, dead_queue
