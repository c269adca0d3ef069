"""/admin/letters and /admin/export: search, look, edit, archive, restore, discard."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from msgspec import Struct
from starlette.responses import Response, StreamingResponse

from holdfast.core.selection import Selection, check_selection, decode_cursor, encode_cursor
from holdfast.errors import Invalid
from holdfast.faces.api.admin.desk import AdminContext, Endpoint, Handler
from holdfast.faces.api.admin.views import (
    ActionReply,
    ActionRequest,
    EditReply,
    EditRequest,
    Filter,
    HistoryReply,
    Id,
    LettersReply,
    LetterView,
    PageQuery,
    RevisionView,
)
from holdfast.services.vault.custody import check_queue

HISTORY_COUNT_MAX = 1_000
EXPORT_PAGE_COUNT = 100

_encode = msgspec.json.Encoder().encode


class BodyQuery(Struct, frozen=True, kw_only=True):
    """Which revision; 0 is the original."""

    revision: Id | None = None
    original: bool = False


async def search(desk: AdminContext) -> LettersReply:
    page_fields = PageQuery.__struct_fields__
    selection = desk.query(Filter, also=page_fields).selection(desk.now_us)
    query = desk.query(PageQuery, also=Filter.__struct_fields__)
    check_queue(desk.caller, selection.queue)
    before = decode_cursor("letters", query.cursor) if query.cursor else 0
    page = await desk.vault.letters.find(selection, before=before, count_max=query.limit)
    count = await desk.vault.letters.count(selection)
    return LettersReply(
        letters=[LetterView.of(one) for one in page.letters],
        count=count.count,
        count_is_exact=count.exact,
        next=encode_cursor("letters", page.after) if page.after else "",
        stopped=page.stopped,
    )


async def show(desk: AdminContext) -> LetterView:
    return LetterView.of(await desk.custody.letter(desk.number(), desk.caller))


async def body(desk: AdminContext) -> Response:
    query = desk.query(BodyQuery)
    letter = await desk.custody.letter(desk.number(), desk.caller)
    content = await desk.custody.content(letter, revision=0 if query.original else query.revision)
    # As bytes to keep, never as a page to show: a body is whatever a stranger sent.
    headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
    return Response(content.body, media_type="application/octet-stream", headers=headers)


async def revisions(desk: AdminContext) -> list[RevisionView]:
    letter = await desk.custody.letter(desk.number(), desk.caller)
    return [
        RevisionView(
            number=one.number,
            at=one.at,
            by=one.by,
            note=one.note,
            body=one.body,
            put=dict(one.put),
            drop=list(one.drop),
        )
        for one in await desk.vault.letters.revisions(letter.id)
    ]


async def edit(desk: AdminContext) -> EditReply:
    wanted = desk.body(EditRequest)
    letter = await desk.custody.letter(desk.number(), desk.caller)
    changed, put, drop = wanted.body, wanted.put, wanted.drop
    if wanted.restore:
        if changed is not None or put or drop:
            raise Invalid("edit is invalid; restore goes with no other change")
        changed = (await desk.custody.content(letter, revision=0)).body
    number = await desk.custody.edit(
        letter.id,
        desk.caller,
        desk.act(reason=wanted.reason),
        revision=wanted.revision,
        body=changed,
        put=put,
        drop=drop,
        sensitive=wanted.sensitive,
    )
    return EditReply(number)


async def history(desk: AdminContext) -> HistoryReply:
    letter = await desk.custody.letter(desk.number(), desk.caller)
    return HistoryReply(await desk.vault.ledger.of_letter(letter.id, count_max=HISTORY_COUNT_MAX))


def _action(word: str) -> Handler:
    async def act(desk: AdminContext) -> ActionReply:
        wanted = desk.body(ActionRequest)
        selection = wanted.selection.selection(desk.now_us)
        count = await desk.custody.act(
            word, selection, expected=wanted.count, act=desk.act(reason=wanted.reason), caller=desk.caller
        )
        return ActionReply(count)

    return act


async def export(desk: AdminContext) -> Response:
    selection = desk.query(Filter).selection(desk.now_us)
    check_selection(selection)
    check_queue(desk.caller, selection.queue)
    return StreamingResponse(_lines(desk, selection), media_type="application/jsonl")


async def _lines(desk: AdminContext, selection: Selection) -> AsyncIterator[bytes]:
    before = 0
    while True:
        page = await desk.vault.letters.find(selection, before=before, count_max=EXPORT_PAGE_COUNT)
        for letter in page.letters:
            content = await desk.custody.content(letter)
            view = msgspec.to_builtins(LetterView.of(letter), builtin_types=())
            raw = {"body": content.body, "raw_properties": content.properties, "put": content.put, "drop": content.drop}
            yield _encode({**view, **raw}) + b"\n"
        if not page.after:
            return
        before = page.after


ENDPOINTS = (
    Endpoint(
        "letters.search",
        "GET",
        "/admin/letters",
        search,
        LettersReply,
        "Find letters, newest first",
        query=(Filter, PageQuery),
    ),
    *(
        Endpoint(
            f"letters.{word}",
            "POST",
            f"/admin/letters/{word}",
            _action(word),
            ActionReply,
            f"{word.capitalize()} a selection: as many letters as were seen, or none",
            request=ActionRequest,
            is_change=True,
        )
        for word in ("archive", "restore", "discard", "resolve")
    ),
    Endpoint("letters.show", "GET", "/admin/letters/{id}", show, LetterView, "One letter"),
    Endpoint(
        "letters.body",
        "GET",
        "/admin/letters/{id}/body",
        body,
        bytes,
        "The bytes of a letter",
        query=(BodyQuery,),
        media="application/octet-stream",
    ),
    Endpoint(
        "letters.revisions", "GET", "/admin/letters/{id}/revisions", revisions, list[RevisionView], "Edits of a letter"
    ),
    Endpoint(
        "letters.edit",
        "POST",
        "/admin/letters/{id}/revisions",
        edit,
        EditReply,
        "Edit a letter: a new revision, the original stays",
        request=EditRequest,
        is_change=True,
    ),
    Endpoint("letters.history", "GET", "/admin/letters/{id}/history", history, HistoryReply, "What was done to it"),
    Endpoint(
        "letters.export",
        "GET",
        "/admin/export",
        export,
        bytes,
        "Letters as JSON Lines, byte for byte",
        query=(Filter,),
        media="application/jsonl",
    ),
)
