"""Templates, and how numbers, moments and sizes are written in them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from holdfast.core.moments import moment

PACKAGE = "holdfast.faces.web"
#: How many characters of a text are shown where there is a line for it.
LINE_CHARACTERS_MAX = 140
STEPS_S = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
MEDIA_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}


class PageFile(NamedTuple):
    """A file of the package that pages need."""

    content: bytes
    media_type: str
    version: str


@cache
def asset(name: str) -> PageFile | None:
    """A file below `static`, by its name; None for what is none of them."""
    found = resources.files(PACKAGE) / "static" / name
    if "/" in name or name.startswith(".") or not found.is_file():
        return None
    content = found.read_bytes()
    ending = name.rpartition(".")[2]
    version = hashlib.sha256(content).hexdigest()[:12]
    return PageFile(content, MEDIA_TYPES.get(ending, "application/octet-stream"), version)


def asset_url(name: str) -> str:
    """Where it is; another version of it is somewhere else, so that a browser may keep it."""
    found = asset(name)
    assert found is not None, name  # noqa: S101 - templates name files that are there
    return f"/static/{found.version}/{name}"


def ago(at: datetime | None, now: datetime | None = None) -> Markup:
    """How long ago, with the exact moment for who looks closer."""
    if at is None:
        return Markup('<span class="faint">–</span>')
    now = now or datetime.now(UTC)
    seconds = (now - at).total_seconds()
    exact = at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    told = _span(abs(seconds))
    told = "now" if told == "0 s" else f"in {told}" if seconds < 0 else f"{told} ago"
    return Markup(f'<time datetime="{at.astimezone(UTC).isoformat()}" title="{exact}">{told}</time>')  # noqa: S704


def exact(at: datetime | None) -> str:
    """A moment to the second, in UTC."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at else "–"


def span(seconds: float) -> str:
    """A duration in its largest unit, or two of them."""
    return _span(seconds)


def _span(seconds: float) -> str:
    for index, (size_s, unit) in enumerate(STEPS_S):
        if seconds >= size_s:
            count, rest_s = divmod(int(seconds), size_s)
            smaller = STEPS_S[index + 1] if index + 1 < len(STEPS_S) else None
            more = rest_s // smaller[0] if smaller and count < 3 else 0
            return f"{count} {unit} {more} {smaller[1]}" if smaller and more else f"{count} {unit}"
    return "0 s"


def number(count: float | None) -> Markup:
    """Digits in threes, by a narrow space that does not break."""
    if count is None:
        return Markup('<span class="faint" title="not known">?</span>')
    return Markup(f"{count:,}".replace(",", "\u202f"))  # noqa: S704 - a number


def size(count: int) -> str:
    """Bytes in a unit that people read."""
    if count < 1024:
        return f"{count} B"
    for unit in ("KiB", "MiB"):
        count_in = count / 1024 if unit == "KiB" else count / 1024**2
        if count_in < 1024 or unit == "MiB":
            return f"{count_in:.1f} {unit}"
    return f"{count} B"


def line(text: str) -> str:
    """The first line of a text, not too long."""
    first = text.strip().split("\n", 1)[0]
    return first if len(first) <= LINE_CHARACTERS_MAX else first[: LINE_CHARACTERS_MAX - 1] + "…"


def segment(text: object) -> str:
    """A text as one part of a path; names of queues may hold anything."""
    return quote(str(text), safe="")


def query(values: Mapping[str, object], **changes: object) -> str:
    """A query string of what is set, with changes; what is changed to nothing is left out."""
    merged = {**values, **changes}
    return urlencode({key: value for key, value in merged.items() if value not in (None, "")})


def bars(values: Sequence[int], *, label: str, width: int = 120, height: int = 28, tone: str = "") -> Markup:
    """A small chart: a bar for each value, the largest fills the height. `label` tells it to who cannot see it, `tone`
    is a class. It is one path: a page may have hundreds."""
    if not values:
        return Markup("")
    most, step = max(values), width / len(values)
    shapes = []
    for index, value in enumerate(values):
        if value > 0:
            left, wide, tall = index * step, max(1.0, step - 1), max(1.5, height * value / most)
            shapes.append(f"M{left:.1f} {height}v-{tall:.1f}h{wide:.1f}v{tall:.1f}z")
    said, kind = escape(label), f"bars {escape(tone)}"
    # By hand: `Markup.format` took most of the time of a page with charts.
    return Markup(  # noqa: S704
        f'<svg class="{kind}" role="img" aria-label="{said}" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" preserveAspectRatio="none"><title>{said}</title><path class="axis" '
        f'd="M0 {height - 0.5}H{width}"/><path d="{"".join(shapes)}"/></svg>'
    )


@cache
def environment() -> Environment:
    """The templates: everything is escaped, and a name that is not there is an error."""
    made = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(
        ago=ago, exact=exact, span=span, number=number, size=size, line=line, segment=segment, moment=moment
    )
    made.globals.update(asset_url=asset_url, bars=bars, query=query)
    return made


def render(template: str, values: Mapping[str, Any]) -> str:
    """A page or a part of one."""
    return environment().get_template(template).render(values)
