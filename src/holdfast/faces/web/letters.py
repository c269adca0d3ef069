"""Letters: found by one search box, selected, and planned, archived, restored, resolved or discarded.

What is searched for stands in the address as the fields of `SearchLetters`; the box only writes them: `queue:orders.dlq
reason:rejected "some words"`. An action is shown with its count before it is done, and done with that count or not at
all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar, cast
from urllib.parse import parse_qsl, urlencode

import msgspec
from starlette.responses import Response

from holdfast.core.moments import moment, parse_duration
from holdfast.core.requests.declare import Request, from_wire, view
from holdfast.core.requests.vault import (
    ActionRequest,
    ArchiveLetters,
    CountLetters,
    DiscardLetters,
    ExportLetters,
    Filter,
    LettersReply,
    ListGroups,
    ListValues,
    PlanRedrive,
    ReadOverview,
    ResolveLetters,
    RestoreLetters,
    SearchLetters,
    ValuesReply,
)
from holdfast.core.states import LetterState
from holdfast.errors import Conflict, HoldfastError, Invalid
from holdfast.faces.web.console import Visit, page
from holdfast.faces.web.rendering import query

#: What the box calls the fields of a filter. A header and an age are said in their own way.
WORDS: Mapping[str, str] = {
    "queue": "queue",
    "state": "state",
    "type": "type",
    "reason": "reason",
    "error": "error",
    "died_in": "source_queue",
    "group": "group",
    "captured_after": "captured_after",
    "captured_before": "captured_before",
    "died_after": "died_after",
    "died_before": "died_before",
    "ids": "ids",
}
LABELS = {field: word.replace("_", " ") for word, field in WORDS.items()} | {
    "older_than": "older than",
    "text": "words",
}
#: Which values are offered for which word of the box.
OFFERED = {
    "queue": "queue",
    "type": "type",
    "reason": "reason",
    "error": "error_type",
    "died_in": "source_queue",
    "group": "group",
    "header": "header",
}
AGES = ("age:<1h", "age:<24h", "age:24h", "age:7d")
STATES = [state.value for state in LetterState if state not in (LetterState.OUTSIDE, LetterState.DELETED)]
TERM = re.compile(r'(?:([a-z_]+):)?("(?:[^"\\]|\\.)*"|\S+)\s*', re.DOTALL)
BOX_CHARACTERS_MAX = 2_000
DAYS = re.compile(r"(\d{1,5})d")
DATE = re.compile(r"\d{4}-\d\d-\d\d")
#: What an address takes; a plan of more letters is asked for by a form.
PLAN_BYTES_MAX = 3_000
FILTER_FIELDS = Filter.__struct_fields__

R = TypeVar("R")


class LetterAction(NamedTuple):
    """What can be done to letters, as it is said to people."""

    word: str
    request: type[ActionRequest]
    state: str  #: which letters it is for
    done: str
    about: str
    asks_count: bool = False


ACTIONS = {
    one.word: one
    for one in (
        LetterAction("archive", ArchiveLetters, "captured", "archived", "They are put aside, and can be restored."),
        LetterAction("restore", RestoreLetters, "archived", "restored", "They can be planned and redriven again."),
        LetterAction("resolve", ResolveLetters, "redriven", "resolved", "They did not come back: they are done with."),
        LetterAction(
            "discard",
            DiscardLetters,
            "captured",
            "discarded",
            "They are given up for good and cannot be restored; the ledger keeps their story.",
            asks_count=True,
        ),
    )
}


class FilterValue(NamedTuple):
    """What is searched for in one respect, and the address without it."""

    label: str
    value: str
    without: str


# --- the box --------------------------------------------------------------------------------------------------


def read_box(text: str, now_us: int) -> dict[str, str]:
    """The fields of a filter that a line of the box names. Raises Invalid."""
    if len(text) > BOX_CHARACTERS_MAX:
        raise Invalid(f"search is invalid; it has more than {BOX_CHARACTERS_MAX} characters")
    found: dict[str, str] = {}
    words: list[str] = []
    for key, written in TERM.findall(text.strip()):
        value = re.sub(r"\\(.)", r"\1", written[1:-1]) if written[:1] == '"' == written[-1:] != written else written
        if not key:
            words.append(value)
        elif key == "header":
            found["header"], _, header_value = value.partition("=")
            found["header_value"] = header_value
        elif key == "age":
            found |= _age(value, now_us)
        elif key in WORDS:
            found[WORDS[key]] = f"{value}T00:00:00Z" if DATE.fullmatch(value) else value
        else:
            known = ", ".join([*WORDS, "header", "age"])
            raise Invalid(f"'{key}' is nothing to search by; use {known}, or put words with a colon into quotes")
    if words:
        found["text"] = " ".join(words)
    return found


def _age(value: str, now_us: int) -> dict[str, str]:
    """`24h` and `>24h` are letters that died so long ago or longer, `<1h` those that died since. Raises Invalid."""
    span = DAYS.sub(lambda days: f"{int(days[1]) * 24}h", value.lstrip("<>"))
    since_us = now_us - parse_duration(span, what="age")
    if not value.startswith("<"):
        return {"older_than": span}
    return {"died_after": moment(max(1, since_us)).replace(microsecond=0).isoformat()}


def written(word: str, value: str) -> str:
    """A term as the box reads it back."""
    plain = value and not re.search(r'[\s"\\]', value)
    return f"{word}:{value}" if plain else '{}:"{}"'.format(word, re.sub(r'(["\\])', r"\\\1", value))


def terms(fields: Mapping[str, str]) -> list[FilterValue]:
    """What is searched for, one by one."""
    found = []
    for name, value in fields.items():
        if name == "header_value":
            continue
        label, gone = LABELS.get(name, name), {name: ""}
        if name == "header":
            header_value = fields.get("header_value", "")
            value, gone = f"{value} = {header_value}" if header_value else value, {name: "", "header_value": ""}
        if name == "ids" and value.count(",") > 2:
            value = f"{value.count(',') + 1} letters"
        found.append(FilterValue(label, value, _address({**fields, **gone})))
    return found


def _address(fields: Mapping[str, str]) -> str:
    return f"/letters?{written_query}" if (written_query := query(fields)) else "/letters"


def _fields(values: Mapping[str, str]) -> dict[str, str]:
    """Those that say which letters."""
    return {name: values[name] for name in FILTER_FIELDS if values.get(name)}


# --- the page -------------------------------------------------------------------------------------------------


@page("GET /letters", bar="Letters", needs=SearchLetters)
async def letters_page(visit: Visit) -> Response:
    """Letters that fit, newest first."""
    fields, typed = _fields(visit.query), visit.query.get("q", "")
    if typed:
        try:
            read = read_box(typed, visit.console.vault_app.now_us)
            text = " ".join(filter(None, (fields.get("text"), read.get("text"))))
            return visit.redirect(_address({**fields, "header_value": "", **read, "text": text}))
        except Invalid as error:
            visit.refuse(error)
    if visit.caller.queues and not fields.get("queue"):
        return await _choose_queue(visit, fields)
    return await _show(visit, fields, typed)


async def _choose_queue(visit: Visit, fields: Mapping[str, str]) -> Response:
    """Who is held to some queues looks at one of them at a time."""
    queues = [one.queue for one in (await visit.ask(ReadOverview())).queues]
    if len(queues) == 1 and not visit.is_refused:
        return visit.redirect(_address({**fields, "queue": queues[0]}))
    return visit.page("letters_queues.html", title="Letters", fields=fields, queues=queues)


async def _show(visit: Visit, fields: dict[str, str], typed: str) -> Response:
    found = LettersReply(letters=[], count=0, count_is_exact=True)
    offered = ValuesReply(values={}, groups={}, looked_at=0)
    try:
        found = await visit.ask(visit.read(SearchLetters))
        offered = await visit.ask(ListValues(queue=fields.get("queue", "")))
    except (Invalid, Conflict) as error:
        visit.refuse(error)
    here = {one.state for one in found.letters}
    return visit.page(
        "letters.html",
        title="Letters",
        found=found,
        fields=fields,
        typed=typed,
        terms=terms(fields),
        states=STATES,
        offered={word: offered.values.get(name, {}) for word, name in OFFERED.items()},
        groups=offered.groups,
        ages=AGES,
        written=written,
        actions=[one for one in ACTIONS.values() if visit.may(one.request)],
        here=here,
        cursor=visit.query.get("cursor", ""),
        may_plan=visit.may(PlanRedrive),
        may_export=visit.may(ExportLetters),
        may_group=visit.may(ListGroups),
    )


# --- what is done to letters ----------------------------------------------------------------------------------


@page("POST /letters/act", form_of=ArchiveLetters)
async def act_page(visit: Visit) -> Response:
    """Says what an action would do, and to how many letters; nothing is done yet."""
    back = _fields(dict(parse_qsl(visit.form.get("back", ""))))
    action, is_all = visit.form.get("action", ""), visit.query.get("scope") == "all"
    ids = [value for name, value in visit.form_items if name == "id" and value.isascii() and value.isdigit()]
    if not is_all and not ids:
        return visit.redirect(_address(back), "Nothing was done: no letter was selected.")
    chosen = back if is_all else _fields({"ids": ",".join(ids), "queue": back.get("queue", "")})
    if action == "plan":
        address = f"/plans/new?{urlencode(chosen)}"
        if len(address) <= PLAN_BYTES_MAX:
            return visit.redirect(address)
        return visit.page("letters_plan.html", title="Plan", fields=chosen, selected=len(ids), back=_address(back))
    if action not in ACTIONS:
        raise Invalid(f"action is invalid; '{action[:40]}' is none of {', '.join(ACTIONS)}")
    return await _ask_for(visit, ACTIONS[action], chosen, _address(back), selected=0 if is_all else len(ids))


async def _ask_for(
    visit: Visit, action: LetterAction, chosen: Mapping[str, str], back: str, *, selected: int
) -> Response:
    """Only letters of the action's state are meant: it is said how many of those that were selected are not."""
    fields = {**chosen, "state": action.state}
    count = (await visit.ask(_read(CountLetters, fields))).count
    sample = (await visit.ask(_read(SearchLetters, fields, limit=5))).letters
    return visit.page(
        "letters_act.html",
        title=f"{action.word.capitalize()} letters",
        action=action,
        fields=fields,
        terms=terms({name: value for name, value in fields.items() if name != "state"}),
        count=count,
        sample=sample,
        left_out=max(0, selected - count),
        selected=selected,
        back=back,
        why=visit.form.get("why", ""),
    )


@page("POST /letters/archive", form_of=ArchiveLetters)
@page("POST /letters/restore", form_of=RestoreLetters)
@page("POST /letters/resolve", form_of=ResolveLetters)
@page("POST /letters/discard", form_of=DiscardLetters)
async def act(visit: Visit) -> Response:
    """Does it to exactly as many letters as were shown, or to none: then what was asked is shown anew."""
    action = ACTIONS[visit.http.url.path.rpartition("/")[2]]
    chosen, back = _fields(visit.form), _address(_fields(dict(parse_qsl(visit.form.get("back", "")))))
    try:
        count = visit.number("count")
        if action.asks_count and visit.number("typed") != count:
            raise Invalid(f"nothing was done; type {count}, the number of letters, to {action.word} them")
        selection = view(Filter, _read(CountLetters, chosen))
        asked = action.request(selection=selection, count=count, reason=visit.form.get("why", "").strip())
        # As from a program: what is too long is refused there as well.
        done = await visit.ask(from_wire(action.request.declared, {}, (), msgspec.json.encode(asked)))
    except HoldfastError as error:
        visit.refuse(error)
        selected = visit.number("selected") if visit.form.get("selected") else 0
        return await _ask_for(visit, action, chosen, back, selected=selected)
    letters = "1 letter" if done.count == 1 else f"{done.count} letters"
    return visit.redirect(back, f"{letters} {action.done}.")


def _read(request: type[Request[R]], fields: Mapping[str, str], **more: object) -> Request[R]:
    """A request of these fields, as a program would make it. Raises Invalid."""
    given = {**fields, **{name: str(value) for name, value in more.items()}}
    return cast("Request[R]", from_wire(request.declared, {}, given.items(), b""))
