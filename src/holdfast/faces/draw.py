"""A topology as a picture: Mermaid for documents, SVG for everything else.

From left to right: exchanges that are published to, main queues, the exchanges behind them, wait and dead queues.
Solid lines are bindings, dashed ones the way of dead letters, red ones what a consumer publishes itself, dotted ones
what cannot be routed.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from statistics import fmean
from typing import NamedTuple

from holdfast.core.moments import format_duration
from holdfast.core.topology import model as t
from holdfast.core.topology.model import Design, Queue
from holdfast.core.topology.routing import Graph, roles_of

COLUMN_PX, ROW_PX, BOX_PX, MARGIN_PX = 330, 46, 30, 30
CHARACTER_PX = 6.6
BOX_WIDTH_PX_MIN, BOX_WIDTH_PX_MAX = 80, 230
LABEL_CHARACTERS_MAX = 60
FONT = 'font-family="sans-serif" font-size="12"'
SMALL = 'class="label" text-anchor="middle" font-size="9" fill="#495057"'
#: What a line is in Mermaid, and its dashes in SVG.
ARROWS = {"solid": "-->", "dashed": "-.->", "published": "==>", "dotted": "-.-o"}
DASHES = {"solid": "", "dashed": "6 3", "published": "", "dotted": "1 4"}
_MERMAID = str.maketrans(
    {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;", "\n": " ", "\r": " "}
)
_STYLES = {
    "exchange": ("#dbe4ff", "#364fc7"),
    "main": ("#e6fcf5", "#087f5b"),
    "wait": ("#fff3bf", "#e67700"),
    "dead": ("#ffe3e3", "#c92a2a"),
}


class Node(NamedTuple):
    """A box: `e:` and its name for an exchange, `q:` for a queue."""

    id: str
    name: str
    role: str
    column: int
    note: str


class Edge(NamedTuple):
    """A line."""

    source: str
    target: str
    label: str
    style: str  #: a key of ARROWS


def nodes(design: Design) -> list[Node]:
    """Every box, with its column."""
    roles = roles_of(design)
    found = [
        Node(f"q:{queue.name}", queue.name, roles[queue.name], 1 if roles[queue.name] == "main" else 3, _note(queue))
        for queue in design.topology.queues
    ]
    ends: dict[str, set[str]] = {}
    for binding in design.topology.bindings:
        ends.setdefault(binding.source, set()).add(roles.get(binding.destination, ""))
    exchanges = {exchange.name: exchange.type for exchange in design.topology.exchanges}
    named = {*ends, *(queue.dead_exchange for queue in design.topology.queues)}
    exchanges |= {name: kind for name, kind in t.BROKERS_EXCHANGES.items() if name in named}
    for name, kind in exchanges.items():
        # It stands behind the main queues when everything that it leads to is a wait or a dead queue.
        behind = name in ends and ends[name] <= {"wait", "dead"}
        found.append(Node(f"e:{name}", name, "exchange", 2 if behind else 0, kind))
    return found


def edges(design: Design) -> list[Edge]:
    """Every line between two boxes."""
    graph = Graph(design.topology)
    boxes = nodes(design)
    known = {node.id for node in boxes}
    found: dict[tuple[str, str, str], list[str]] = {}
    for binding in design.topology.bindings:
        target = f"{'q' if binding.destination_type == 'queue' else 'e'}:{binding.destination}"
        found.setdefault((f"e:{binding.source}", target, "solid"), []).append(binding.key)
    for queue in design.topology.queues:
        if queue.dead_exchange:
            key = queue.arguments.get(t.DEAD_KEY, "")
            found.setdefault((f"q:{queue.name}", f"e:{queue.dead_exchange}", "dashed"), []).append(key)
        else:
            for target in sorted(graph.targets[queue.name]):
                found.setdefault((f"q:{queue.name}", f"q:{target}", "dashed"), []).append("")
    for family in design.families:
        # What a consumer publishes when it retries or parks: the broker knows nothing of it.
        places = [("retries", wait) for wait in family.waits[1:]] + ([("parks", family.dead)] if family.dead else [])
        for word, place in places:
            if place.queue != family.rejected_to:
                target = f"e:{place.exchange}" if place.exchange else f"q:{place.queue}"
                found.setdefault((f"q:{family.queue}", target, "published"), [word])
    published_to = {node.id for node in boxes if node.role == "exchange" and node.column == 0}
    for exchange in design.topology.exchanges:
        # Those behind the queues have the same net; drawn, it would hide everything else.
        if exchange.alternate and f"e:{exchange.name}" in published_to:
            found.setdefault((f"e:{exchange.name}", f"e:{exchange.alternate}", "dotted"), []).append("")
    return [
        Edge(source, target, _joined(labels), style)
        for (source, target, style), labels in found.items()
        if source in known and target in known
    ]


def mermaid(design: Design) -> str:
    """A flowchart that GitHub and most wikis show."""
    boxes = nodes(design)
    numbers = {node.id: f"n{number}" for number, node in enumerate(boxes)}
    lines = ["flowchart LR"]
    for node in boxes:
        text = _quoted(node.name, node.note)
        shape = f"{{{{{text}}}}}" if node.role == "exchange" else f"[({text})]"
        lines.append(f"    {numbers[node.id]}{shape}:::{node.role}")
    for edge in edges(design):
        label = f"|{_quoted(edge.label)}|" if edge.label else ""
        lines.append(f"    {numbers[edge.source]} {ARROWS[edge.style]}{label} {numbers[edge.target]}")
    lines += [f"    classDef {role} fill:{fill},stroke:{stroke}" for role, (fill, stroke) in _STYLES.items()]
    return "\n".join(lines) + "\n"


def svg(design: Design, *, depths: Mapping[str, str] = {}, links: Mapping[str, str] = {}) -> str:
    """A drawing by itself: no script, no font, no style, colours as attributes. On a page queues have their depth, and
    lead somewhere; by their classes the page gives them its own colours."""
    boxes = nodes(design)
    lines = edges(design)
    places = _places(boxes, lines)
    width = max((x for x, _ in places.values()), default=0) + BOX_WIDTH_PX_MAX + 2 * MARGIN_PX
    height = max((y for _, y in places.values()), default=0) + BOX_PX + 2 * MARGIN_PX
    size = f'width="{width:g}" height="{height:g}"'
    marker = '<marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {size} {FONT}>',
        f'<defs>{marker}<path class="head" d="M0 0L8 4L0 8z" fill="#495057"/></marker></defs>',
        f'<rect class="ground" {size} fill="#ffffff"/>',
        *(_line(edge, places) for edge in lines),
        *(_drawn(node, places[node.id], depths, links) for node in boxes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _joined(labels: list[str]) -> str:
    text = ", ".join(label for label in labels if label)
    return text if len(text) <= LABEL_CHARACTERS_MAX else text[: LABEL_CHARACTERS_MAX - 1] + "…"


def _note(queue: Queue) -> str:
    ttl_ms = queue.arguments.get(t.TTL)
    words = [queue.type if queue.type != "classic" else "", format_duration(ttl_ms * 1000) if ttl_ms else ""]
    return " ".join(filter(None, words))


def _places(boxes: list[Node], lines: list[Edge]) -> dict[str, tuple[float, float]]:
    """Column by column: main queues by name, everything else as near to its neighbours as it can be."""
    near: dict[str, list[str]] = {node.id: [] for node in boxes}
    leaving: dict[str, int] = dict.fromkeys(near, 0)
    for edge in lines:
        near[edge.source].append(edge.target)
        near[edge.target].append(edge.source)
        leaving[edge.source] += 1
    rows: dict[str, float] = {}
    for column in (1, 0, 2, 3):
        members = [node for node in boxes if node.column == column]
        wished = {
            node.id: fmean([rows[other] for other in near[node.id] if other in rows] or [0.0]) for node in members
        }
        members.sort(key=lambda node: (wished[node.id], node.name))
        row = 0.0
        for node in members:
            row = max(row, wished[node.id])
            rows[node.id] = row
            # A main queue leaves room for the wait and dead queues that belong to it.
            row += max(1, leaving[node.id]) if column == 1 else 1
    return {node.id: (MARGIN_PX + node.column * COLUMN_PX, MARGIN_PX + rows[node.id] * ROW_PX) for node in boxes}


def _width(node_name: str, note: str) -> float:
    wanted = max(len(node_name), len(note)) * CHARACTER_PX + 20
    return min(max(wanted, BOX_WIDTH_PX_MIN), BOX_WIDTH_PX_MAX)


def _drawn(node: Node, place: tuple[float, float], depths: Mapping[str, str], links: Mapping[str, str]) -> str:
    is_queue = node.role != "exchange"
    box = _box(node, place, depths.get(node.name, "") if is_queue else "")
    return f'<a href="{escape(links[node.name])}">{box}</a>' if is_queue and node.name in links else box


def _box(node: Node, place: tuple[float, float], depth: str = "") -> str:
    x, y = place
    fill, stroke = _STYLES[node.role]
    width = _width(node.name, node.note)
    radius = 4 if node.role == "exchange" else 14
    letters = int((width - 16) / CHARACTER_PX)
    name = node.name if len(node.name) <= letters else node.name[: letters - 1] + "…"
    middle = x + width / 2
    colours = f'fill="{fill}" stroke="{stroke}"'
    lines = [
        f'<g class="box {node.role}"><title>{_safe(f"{node.role} {node.name} {node.note} {depth}")}</title>',
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX_PX}" rx="{radius}" {colours}/>',
        f'<text x="{middle:g}" y="{y + (14 if node.note else 19):g}" text-anchor="middle">{_safe(name)}</text>',
        f'<text x="{middle:g}" y="{y + 25:g}" {SMALL}>{_safe(node.note)}</text>' if node.note else "",
        f'<text class="depth" x="{x + width + 6:g}" y="{y + 12:g}" font-weight="700">{_safe(depth)}</text>'
        if depth
        else "",
        "</g>",
    ]
    return "".join(lines)


def _line(edge: Edge, places: dict[str, tuple[float, float]]) -> str:
    (x1, y1), (x2, y2) = places[edge.source], places[edge.target]
    start, end = _width(edge.source[2:], ""), _width(edge.target[2:], "")
    dash = f' stroke-dasharray="{DASHES[edge.style]}"' if DASHES[edge.style] else ""
    if x2 > x1:
        from_x, from_y, to_y = x1 + start, y1 + BOX_PX / 2, y2 + BOX_PX / 2
        bend = (x2 - from_x) / 2
        path = f"M{from_x:g} {from_y:g}C{from_x + bend:g} {from_y:g} {x2 - bend:g} {to_y:g} {x2:g} {to_y:g}"
        # Below its line, where what a consumer publishes goes the way of the dead letters: each has its own words.
        label_x, label_y = from_x + bend, (from_y + to_y) / 2 + (10 if edge.style == "published" else -3)
    else:
        low = max(y1, y2) + BOX_PX + 12
        from_x, to_x = x1 + start / 2, x2 + end / 2
        path = f"M{from_x:g} {y1 + BOX_PX:g}C{from_x:g} {low:g} {to_x:g} {low:g} {to_x:g} {y2 + BOX_PX:g}"
        label_x, label_y = (from_x + to_x) / 2, low - 2
    colour = "#c92a2a" if edge.style == "published" else "#868e96"
    line = f'<path class="way {edge.style}" d="{path}" fill="none" stroke="{colour}"{dash} marker-end="url(#end)"/>'
    return line + (f'<text x="{label_x:g}" y="{label_y:g}" {SMALL}>{_safe(edge.label)}</text>' if edge.label else "")


def _safe(text: str) -> str:
    """For XML: escaped, and without what XML cannot say at all."""
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


def _quoted(*lines: str) -> str:
    """For Mermaid: a name may hold anything, and a quote would end the text."""
    return '"' + "<br/>".join(line.translate(_MERMAID) for line in lines if line) + '"'
