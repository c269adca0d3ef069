"""One letter: the story of its death, its body, properties, headers and revisions; and the form that edits it.

What is shown of it is never what is sent: bodies are indented for reading, and the form changes only what was changed
in it. Whoever was slower than somebody else keeps what he wrote, and is told what the other has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from holdfast.core.death import DROPPED_HEADERS, REDRIVEN_AT, STORY_HEADERS
from holdfast.core.ledger import LedgerRow
from holdfast.core.letter import SENSITIVE_HEADERS
from holdfast.core.requests.declare import from_wire
from holdfast.core.requests.vault import (
    EditLetter,
    GroupView,
    LetterReply,
    ListRevisions,
    PlanRedrive,
    ReadBody,
    ReadGroup,
    ReadHistory,
    ReadLetter,
    ReadRedrive,
    RevisionView,
)
from holdfast.core.selection import ID_MAX
from holdfast.core.states import LetterState
from holdfast.errors import Conflict, Forbidden, Invalid, NotFound
from holdfast.faces.web.bodies import DIFF_BYTES_MAX, BodyView, DiffLine, as_text, diff, part_of, shown_body
from holdfast.faces.web.console import PAGE_HEADERS, Visit, page
from holdfast.faces.web.letters import ACTIONS
from holdfast.faces.web.rendering import LINE_CHARACTERS_MAX

#: Bytes to keep, never a page to show: a body is whatever a stranger sent.
DOWNLOAD_HEADERS = {
    **PAGE_HEADERS,
    "content-security-policy": "sandbox; default-src 'none'",
    "x-content-type-options": "nosniff",
}
EDITED_BYTES_MAX = 1024 * 1024
DIFFS_COUNT_MAX = 10
NEW_HEADERS_COUNT = 2
#: How a header's value is written that JSON has no word for; only whoever sent it could write another one.
FOREIGN = ("timestamp", "bytes", "decimal", "double", "undecodable")
#: How many times as long a value may become by being indented.
GROWTH_MAX = 4
#: So many deaths of its headers are told, the newest.
DEATHS_COUNT_MAX = 20
CAPTURED = LetterState.CAPTURED.value
_json = msgspec.json.Encoder().encode


class LetterMoment(NamedTuple):
    """Something that happened to a letter."""

    at: datetime | None
    tone: str
    title: str
    text: str = ""
    who: str = ""
    letters: tuple[int, ...] = ()  #: others that it is about
    redrive: int = 0
    stack: str = ""


class HeaderView(NamedTuple):
    """A header as it is shown, and what the newest revision does to it."""

    name: str
    kind: str
    value: str
    change: str  #: `new`, `edited` or `taken off`; empty for none
    was: str = ""

    @property
    def brief(self) -> str:
        """The beginning of a value that is long; empty for one that is not."""
        is_long = "\n" in self.value or len(self.value) > 2 * LINE_CHARACTERS_MAX
        return " ".join(self.value[:LINE_CHARACTERS_MAX].split()) + " …" if is_long else ""


class EditedHeader(NamedTuple):
    """A header in the form. What is not `open` can only be taken off."""

    name: str
    kind: str
    value: str
    form: str  #: how the value is written: as `text` or as `json`
    is_open: bool
    drop: bool = False


class RevisionDiff(NamedTuple):
    """An edit, with what it changed of the body before it; `diff` is none where that is not told."""

    view: RevisionView
    diff: list[DiffLine] | None
    is_diffed: bool


# --- reading --------------------------------------------------------------------------------------------------


@page("GET /letters/{id}")
async def letter_page(visit: Visit) -> Response:
    """Everything that is known of a letter."""
    letter = await visit.ask(visit.read(ReadLetter))
    history = (await visit.ask(ReadHistory(id=letter.id))).rows
    may_read = visit.may(ReadBody)
    revisions = await visit.ask(ListRevisions(id=letter.id)) if may_read and letter.revision else []
    number = _whole(visit, "revision", letter.revision, most=letter.revision)
    return visit.page(
        "letter.html",
        title=f"Letter {letter.id}",
        letter=letter,
        story=story(letter, history),
        body=await _body(visit, letter, revisions, number) if may_read else None,
        number=number,
        revisions=await _with_diffs(visit, letter, revisions),
        headers=list(_headers(letter, revisions)),
        properties=[
            (name, letter.kinds.properties.get(name, ""), said(one)) for name, one in letter.properties.items()
        ],
        actions=[one for one in ACTIONS.values() if visit.may(one.request) and one.state == letter.state],
        may_plan=visit.may(PlanRedrive) and letter.state == CAPTURED,
        may_edit=visit.may(EditLetter) and letter.state == CAPTURED,
        group=await _group(visit, letter),
        may_redrive=visit.may(ReadRedrive),
        said=said,
    )


async def _group(visit: Visit, letter: LetterReply) -> GroupView | None:
    """The cause that it died of, for those who see groups."""
    try:
        return await visit.ask(ReadGroup(key=letter.group)) if visit.may(ReadGroup) else None
    except NotFound:
        return None


def _whole(visit: Visit, name: str, default: int, *, most: int = ID_MAX) -> int:
    """A number of the query, as far as it is one."""
    text = visit.query.get(name, "")
    return min(int(text), most) if text.isascii() and text.isdigit() and len(text) < 19 else default


async def _body(visit: Visit, letter: LetterReply, revisions: Sequence[RevisionView], number: int) -> BodyView:
    """A part of the body of a revision."""
    edited = [one.body for one in revisions if one.body is not None and one.number <= number]
    size = len(edited[-1]) if edited else letter.body_bytes
    mode = visit.query.get("view", "")
    start = _whole(visit, "from", 0, most=max(0, size - 1))
    content = await visit.ask(_read_body(letter.id, number, skip=start, limit=max(1, part_of(size, mode))))
    return shown_body(content, start=start, size=size, mode="hex" if mode == "hex" else "raw" if mode == "raw" else "")


def _read_body(letter: int, number: int, *, skip: int = 0, limit: int | None = None) -> ReadBody:
    return ReadBody(id=letter, revision=number or None, original=not number, skip=skip, limit=limit)


async def _with_diffs(visit: Visit, letter: LetterReply, revisions: Sequence[RevisionView]) -> list[RevisionDiff]:
    """Newest first; the last few with what they changed of the body."""
    if not revisions:
        return []
    before = await visit.ask(_read_body(letter.id, 0, limit=DIFF_BYTES_MAX + 1))
    found = []
    for one in revisions:
        is_diffed = one.body is not None and one.number > letter.revision - DIFFS_COUNT_MAX
        found.append(RevisionDiff(one, diff(before, one.body) if one.body and is_diffed else None, is_diffed))
        before = one.body if one.body is not None else before
    return found[::-1]


def said(value: object) -> str:
    """A value of a header or a property, for people."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and len(value) == 1 and (name := next(iter(value))) in FOREIGN:
        return str(value[name])
    written = _json(value)
    if len(written) <= LINE_CHARACTERS_MAX:
        return written.decode()
    pretty = msgspec.json.format(written, indent=2)
    # What is nested deeply would become far larger than it is.
    return (pretty if len(pretty) <= GROWTH_MAX * len(written) else written).decode()


def _headers(letter: LetterReply, revisions: Sequence[RevisionView]) -> Iterator[HeaderView]:
    put, drop = (revisions[-1].put, revisions[-1].drop) if revisions else ({}, [])
    for name, value in letter.headers.items():
        kind = letter.kinds.headers.get(name, "")
        if name in put:
            yield HeaderView(name, kind, said(put[name]), "edited", said(value))
        else:
            yield HeaderView(name, kind, said(value), "taken off" if name in drop else "")
    for name in put:
        if name not in letter.headers:
            yield HeaderView(name, "", said(put[name]), "new")


@page("GET /letters/{id}/body")
async def download(visit: Visit) -> Response:
    """The bytes of a revision, or of the original, to keep."""
    asked = visit.read(ReadBody)
    content = await visit.ask(asked)
    ending = "json" if content[:1] in (b"{", b"[") else "bin"
    headers = {**DOWNLOAD_HEADERS, "content-disposition": f'attachment; filename="letter-{visit.name("id")}.{ending}"'}
    return Response(content, media_type="application/octet-stream", headers=headers)


# --- the story of its death -----------------------------------------------------------------------------------


def story(letter: LetterReply, history: Sequence[LedgerRow]) -> list[LetterMoment]:
    """What happened to it, in this order: as its headers tell, whose moments others wrote, and as the ledger does."""
    return [*_before(letter), *_after(letter, history)]


def _before(letter: LetterReply) -> Iterator[LetterMoment]:
    """Until it was captured, as its headers tell: they were written by others."""
    headers = letter.headers
    where = f"exchange {letter.exchange or '(default)'}, key {letter.routing_key}" if letter.exchange else ""
    first = [headers.get(name) for name in ("x-original-exchange", "x-original-routing-key")]
    if all(isinstance(one, str) for one in first) and first[1]:
        where = f"exchange {first[0] or '(default)'}, key {first[1]}"
    yield LetterMoment(_moment(letter.properties.get("timestamp")), "info", "Published", where)
    if REDRIVEN_AT in headers:
        by, count = (said(headers.get(f"x-redriven-{name}", "")) for name in ("by", "count"))
        before = (letter.came_from,) if letter.came_from else ()
        yield LetterMoment(_moment(headers[REDRIVEN_AT]), "info", f"Redriven, redrive {count} of it", "", by, before)
    deaths = headers.get("x-death")
    for one in reversed(deaths[:DEATHS_COUNT_MAX]) if isinstance(deaths, list) else ():
        if isinstance(one, dict):
            times_count, reason = one.get("count"), said(one.get("reason", ""))
            times = f", {times_count} times" if isinstance(times_count, int) and times_count > 1 else ""
            tone = "" if reason == "expired" else "bad"
            yield LetterMoment(
                _moment(one.get("time")), tone, f"{reason or 'dead'} in {said(one.get('queue', '?'))}{times}"
            )
    error = ": ".join(filter(None, (letter.error_type, letter.error_message)))
    tries = f" after {letter.attempts} attempt{'s' if letter.attempts != 1 else ''}" if letter.attempts else ""
    title = f"Died in {letter.source_queue or 'a queue that nothing tells of'}{tries}"
    reason = "" if letter.attempts and letter.reason == "attempts" else letter.reason  # the title tells it
    by = said(headers.get("x-parked-by", ""))
    yield LetterMoment(
        letter.died_at,
        "bad",
        f"{title}: {reason}" if reason else title,
        error,
        by,
        stack=letter.error_stack,
    )


def _after(letter: LetterReply, history: Sequence[LedgerRow]) -> Iterator[LetterMoment]:
    """From its capture on, as the ledger tells."""
    again = tuple(letter.came_back_as)
    for row in history:
        redrive = row.detail.removeprefix("redrive ") if row.detail.startswith("redrive ") else ""
        number = int(redrive) if redrive.isascii() and redrive.isdigit() and len(redrive) < 19 else 0
        tone, title = _TOLD.get(row.to_state, ("info", row.action))
        others: tuple[int, ...] = ()
        if row.to_state == "captured" and not row.from_state:
            title = f"Captured from {letter.queue}"
            others = (letter.came_from,) if letter.came_from else ()
        elif row.to_state == "captured":
            tone, title = ("info", "Restored") if row.from_state == "archived" else ("bad", "Not redriven")
        elif row.to_state == "came_back":
            others = again
        elif not row.to_state:
            title = _DONE.get(row.action, title)
        if row.outcome == "denied":
            tone, title = "", f"Refused: {row.action}"
        text = "; ".join(filter(None, (row.reason, "" if number or row.to_state == "came_back" else row.detail)))
        yield LetterMoment(row.at, tone, title, text, row.actor, others, number)


#: What a state is called that a letter came into.
_TOLD = {
    "redriving": ("info", "Taken by a redrive"),
    "redriven": ("good", "Redriven: the broker has it"),
    "resolved": ("good", "Resolved: it did not come back"),
    "came_back": ("bad", "Came back: it died again"),
    "archived": ("", "Archived"),
    "discarded": ("bad", "Discarded"),
    "captured": ("info", "Captured"),
}


#: What an act is called that brings a letter into no other state.
_DONE = {
    "letters.edit": "Edited",
    "capture.matched": "Delivered again, and recognised",
    "redrives.start": "A redrive of it was started",
}


def _moment(value: object) -> datetime | None:
    """A moment that a header tells, as far as it is one."""
    text = value.get("timestamp") if isinstance(value, dict) else value
    try:
        found = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found and found.tzinfo is None else found


# --- editing --------------------------------------------------------------------------------------------------


class EditedLetter(NamedTuple):
    """A letter as it stands at a revision, for the form: `text` is none where the body is nothing to write in."""

    letter: LetterReply
    revision: int
    body: bytes
    text: str | None
    why_not: str
    newline: str
    headers: dict[str, Any]  #: as this revision has them
    original: dict[str, Any]
    changes: tuple[dict[str, Any], list[str]]  #: what the revision puts and drops


async def _draft(visit: Visit, letter: LetterReply, number: int) -> EditedLetter:
    revisions = [one for one in await visit.ask(ListRevisions(id=letter.id)) if one.number <= number]
    put, drop = (revisions[-1].put, revisions[-1].drop) if revisions else ({}, [])
    body = await visit.ask(_read_body(letter.id, number, limit=EDITED_BYTES_MAX + 1))
    text, newline, why_not = _writable(body)
    headers = {name: value for name, value in letter.headers.items() if name not in drop} | put
    return EditedLetter(letter, number, body, text, why_not, newline, headers, letter.headers, (put, drop))


def _writable(body: bytes) -> tuple[str | None, str, str]:
    """The body as text, how its lines end, and why it is nothing to write in: a browser ends all lines alike."""
    if len(body) > EDITED_BYTES_MAX:
        return None, "", "It is too large to be edited here"
    _, text = as_text(body)
    if text is None:
        return None, "", "It is not text"
    rest = text.replace("\r\n", "")
    if "\r" in rest or ("\n" in rest and "\r\n" in text):
        return None, "", "Its lines end in several ways, which a browser would make one"
    return text, "\r\n" if "\r\n" in text else "\n", ""


def _rows(draft: EditedLetter, names: Sequence[str], form: Mapping[str, str]) -> list[EditedHeader]:
    """The headers of the form, with what was written in it already."""
    found = []
    for name in names:
        value, kind = draft.headers[name], draft.letter.kinds.headers.get(name, "")
        is_text = isinstance(value, str)
        is_foreign = isinstance(value, dict) and len(value) == 1 and next(iter(value)) in FOREIGN
        is_open = not is_foreign and not (is_text and "\r" in value)
        text = value if is_text else said(value) if is_foreign else _json(value).decode()
        key = f"h-{name}"
        found.append(
            EditedHeader(
                name,
                kind,
                form.get(key, text).replace("\r\n", "\n") if is_open else text,
                form.get(f"as-{name}", "text" if is_text else "json"),
                is_open,
                f"drop-{name}" in form,
            )
        )
    return found


def _class_of(name: str) -> str:
    if name in DROPPED_HEADERS or name in STORY_HEADERS:
        return "locked"
    return "sensitive" if name in SENSITIVE_HEADERS else "free"


def _show_form(
    visit: Visit, draft: EditedLetter, form: Mapping[str, str], since: Sequence[RevisionDiff] = ()
) -> Response:
    classes: dict[str, list[str]] = {"free": [], "sensitive": [], "locked": []}
    for name in draft.headers:
        classes[_class_of(name)].append(name)
    is_open = draft.letter.origin == "rabbitmq"  # an item of an embedded queue has no headers
    return visit.page(
        "letter_edit.html",
        title=f"Edit letter {draft.letter.id}",
        letter=draft.letter,
        draft=draft,
        text=form.get("body", draft.text or "").replace("\r\n", "\n"),
        free=_rows(draft, classes["free"], form),
        sensitive=_rows(draft, classes["sensitive"], form),
        locked=[(name, said(draft.headers[name]), name in DROPPED_HEADERS) for name in classes["locked"]],
        new=[(form.get(f"new-{n}", ""), form.get(f"value-{n}", ""), form.get(f"new-as-{n}", "text")) for n in range(2)],
        has_headers=is_open,
        means="sensitive" in form or any(name in draft.changes[0] for name in SENSITIVE_HEADERS),
        why=form.get("why", ""),
        since=since,
        said=said,
    )


@page("GET /letters/{id}/edit")
async def edit_page(visit: Visit) -> Response:
    """The form with the letter as it is now."""
    if not visit.may(EditLetter):
        raise Forbidden("forbidden; letters are edited by admins")
    letter = await visit.ask(visit.read(ReadLetter))
    return _show_form(visit, await _draft(visit, letter, letter.revision), {})


@page("POST /letters/{id}/edit", form_of=EditLetter)
async def edit(visit: Visit) -> Response:
    """Makes a revision of what was changed in the form since it was shown."""
    letter = await visit.ask(visit.read(ReadLetter))
    form = dict(visit.form)
    seen = min(visit.number("revision"), letter.revision)
    draft = await _draft(visit, letter, seen)
    try:
        made = await visit.ask(_asked(draft, form))
    except (Invalid, Conflict) as error:
        visit.refuse(error)
        if letter.revision == seen and letter.state == CAPTURED:
            return _show_form(visit, draft, form)
        newest = await _draft(visit, letter, letter.revision)
        revisions = await visit.ask(ListRevisions(id=letter.id))
        since = [one for one in await _with_diffs(visit, letter, revisions) if one.view.number > seen]
        return _show_form(visit, newest, _touched(draft, newest, form), since)
    return visit.redirect(f"/letters/{letter.id}", f"Revision {made.revision} is made; the original stays.")


@page("POST /letters/{id}/original")
async def restore(visit: Visit) -> Response:
    """Makes the original the newest revision."""
    letter = await visit.ask(visit.read(ReadLetter))
    asked = EditLetter(id=letter.id, revision=visit.number("revision"), restore=True, reason="the original again")
    try:
        made = await visit.ask(asked)
    except (Invalid, Conflict) as error:
        what, _, more = error.message.partition(";")
        return visit.redirect(f"/letters/{letter.id}", f"Nothing was done: {what};{more}.")
    return visit.redirect(f"/letters/{letter.id}", f"Revision {made.revision} is the original again.")


def _asked(draft: EditedLetter, form: Mapping[str, str]) -> EditLetter:
    """What the form changes, on top of what the revision that it began with does. Raises Invalid."""
    before_put, before_drop = draft.changes
    put, drop = dict(before_put), list(before_drop)
    for row in _rows(draft, list(draft.headers), form) if draft.letter.origin == "rabbitmq" else ():
        value = _value(row) if row.is_open and f"h-{row.name}" in form else draft.headers[row.name]
        if row.drop:
            put.pop(row.name, None)
            drop += [row.name] if row.name in draft.original and row.name not in drop else []
        elif _json(value) != _json(draft.headers[row.name]):
            put[row.name] = value
    for place in range(NEW_HEADERS_COUNT):
        name = form.get(f"new-{place}", "").strip()
        if name:
            form_of = form.get(f"new-as-{place}", "text")
            put[name] = _value(EditedHeader(name, "", form.get(f"value-{place}", ""), form_of, is_open=True))
            drop = [one for one in drop if one != name]
    body = None
    if draft.text is not None and "body" in form:
        written = form["body"].replace("\r\n", "\n").replace("\n", draft.newline)
        body = None if written == draft.text else written.encode()
    if body is None and (put, drop) == draft.changes:
        raise Invalid("nothing was changed; write another body, or change a header")
    asked = EditLetter(
        id=draft.letter.id,
        revision=draft.revision,
        body=body,
        put=put,
        drop=drop,
        sensitive="sensitive" in form,
        reason=form.get("why", "").strip(),
    )
    fields = {name: getattr(asked, name) for name in asked.__struct_fields__ if name != "id"}
    return from_wire(EditLetter.declared, {"id": str(asked.id)}, (), _json(fields))  # type: ignore[return-value]


def _value(row: EditedHeader) -> object:
    """What was written for a header. Raises Invalid."""
    if row.form != "json":
        return row.value
    try:
        return msgspec.json.decode(row.value.encode())
    except (msgspec.DecodeError, RecursionError) as error:
        raise Invalid(f"header '{row.name[:100]}' is invalid; {error}, choose text if it is no JSON") from error


def _touched(seen: EditedLetter, newest: EditedLetter, form: Mapping[str, str]) -> dict[str, str]:
    """What was changed in the form since it was shown: all else is as the newest revision has it."""
    kept = {name: value for name, value in form.items() if not name.startswith(("h-", "as-", "drop-", "body"))}
    for row in _rows(seen, list(seen.headers), form):
        (shown,) = _rows(seen, [row.name], {})
        if row != shown and row.name in newest.headers:
            kept |= {
                name: form[name] for name in (f"h-{row.name}", f"as-{row.name}", f"drop-{row.name}") if name in form
            }
    written = form.get("body", "").replace("\r\n", "\n")
    if "body" in form and written != (seen.text or "").replace("\r\n", "\n"):
        kept["body"] = written
    return kept
