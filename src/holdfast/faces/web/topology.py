"""Topology: what stands at the broker as a picture with live depths, and what in it is known to lose messages."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup
from starlette.responses import Response

from holdfast.core.requests.recover import ReadTopology, TopologyReply
from holdfast.core.topology.model import Design, Version
from holdfast.faces.draw import svg
from holdfast.faces.web.console import Visit, page
from holdfast.faces.web.rendering import query

#: More boxes are no picture any more, and take long to place.
DRAWN_COUNT_MAX = 150
SHOWN_COUNT_MAX = 200
ROLES = ("main", "wait", "dead")


@page("GET /topology", bar="Topology", needs=ReadTopology)
async def topology(visit: Visit) -> Response:
    """All of it, or what has a word in its name."""
    found = await visit.ask(visit.read(ReadTopology))
    design = Design(
        topology=found.topology,
        families=tuple(found.families),
        dead_queues=frozenset(found.dead_queues),
        version=Version.parse(found.version or "3.10"),
    )
    roles, boxes_count = found.roles, len(found.topology.queues) + len(found.topology.exchanges)
    reasons: dict[tuple[bool, str], list[str]] = {}
    for one in found.hazards:
        reasons.setdefault((one.fatal, one.reason), []).append(one.name)
    is_drawn = 0 < boxes_count <= DRAWN_COUNT_MAX
    return visit.page(
        "topology.html",
        title="Topology",
        found=found,
        roles=roles,
        boxes_count=boxes_count,
        queues=sorted(found.topology.queues, key=lambda one: (ROLES.index(roles[one.name]), one.name))[
            :SHOWN_COUNT_MAX
        ],
        picture=_picture(found, design, roles) if is_drawn else None,
        reasons=reasons,
        links=_links(roles),
    )


def _picture(found: TopologyReply, design: Design, roles: Mapping[str, str]) -> Markup:
    depths = {name: f"{depth.messages:,}".replace(",", " ") for name, depth in found.depths.items() if depth.messages}
    return Markup(svg(design, depths=depths, links=_links(roles)))  # noqa: S704 - it escapes what it is given


def _links(roles: Mapping[str, str]) -> dict[str, str]:
    """From a dead queue to its letters, from the others to what is around them."""
    return {
        name: f"/letters?{query({'queue': name})}" if role == "dead" else f"/topology?{query({'like': name})}"
        for name, role in roles.items()
    }
