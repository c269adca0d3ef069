"""News for open pages: which topics have changed, as server-sent events. What changed is asked for with the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.responses import Response, StreamingResponse

from holdfast.errors import Unauthorized
from holdfast.faces.web.console import Visit, page

#: A browser that lost its stream comes again after so long.
AGAIN_MS = 3_000
#: Then it begins another one.
STREAM_S = 3_600.0
EVENTS = "text/event-stream"
ENDED = b"event: ended\ndata:\n\n"


@page("GET /live", is_open=True)
async def live(visit: Visit) -> Response:
    """`changed` with topics, until the session has ended: then `ended`. Nothing else is ever told here."""
    if not visit.is_signed_in:
        # A redirect, or any other status, would make the browser complain in its console and be none the wiser.
        await visit.console.authenticator.slow_down(visit.http.scope, Unauthorized())
        return Response(ENDED, media_type=EVENTS)
    if visit.http.method == "HEAD":
        return Response(media_type=EVENTS)
    return StreamingResponse(_told(visit), media_type=EVENTS)


async def _told(visit: Visit) -> AsyncGenerator[bytes]:
    authenticator, scope = visit.console.authenticator, visit.http.scope
    loop = asyncio.get_running_loop()
    until_s = loop.time() + STREAM_S
    # Up to where the page is, as it says itself; or the stream before this one, as the browser says.
    mark = visit.http.headers.get("last-event-id") or visit.query.get("since", "")
    yield b"retry: %d\n\n" % AGAIN_MS
    try:
        with authenticator.while_let_in(scope, visit.caller, is_endless=True):
            async with aclosing(visit.console.changes.listen(mark)) as changes:
                async for topics in changes:
                    authenticator.caller(scope)
                    yield _changed(visit, topics) if topics else b": still here\n\n"
                    if loop.time() > until_s:
                        return  # the browser begins another one
    except Unauthorized:
        yield ENDED


def _changed(visit: Visit, topics: Sequence[str]) -> bytes:
    return f"event: changed\nid: {visit.console.changes.mark}\ndata: {' '.join(topics)}\n\n".encode()
