"""The first page: what died, where, since when; and what needs somebody."""

from __future__ import annotations

from starlette.responses import Response

from holdfast.core.requests.vault import ListCaptures, ListDeadQueues
from holdfast.faces.web.console import Visit, page


@page("GET /", bar="Overview")
async def overview(visit: Visit) -> Response:
    """Every dead queue, and whether anything stands still."""
    queues = await visit.ask(ListDeadQueues())
    captures = {one.queue: one for one in await visit.ask(ListCaptures())}
    return visit.page("overview.html", title="Overview", queues=queues, captures=captures)
