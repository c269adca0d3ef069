"""What `/admin` and the command line ask of custody, answered: one handler for each request.

`VaultApp.call` lets a caller ask: it checks the role, and what a refused caller wanted to change is in the ledger.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from holdfast.core.ledger import LedgerAct, expand
from holdfast.core.letter import NAME_CHARACTERS_MAX, GroupStatus, clip
from holdfast.core.plan import Plan, PlanOptions, RedriveState, RedriveTask
from holdfast.core.requests.declare import HANDLERS, Caller, Declared, Request, Role, Stream, handles
from holdfast.core.requests.vault import (
    ActionReply,
    ActionRequest,
    ArchiveLetters,
    BalanceRow,
    CancelRedrive,
    CaptureReport,
    ChangeGroup,
    CreateToken,
    DiscardLetters,
    EditLetter,
    EditReply,
    ExportLetters,
    FailedReply,
    FailedView,
    GroupsReply,
    GroupView,
    HeadReply,
    HistoryReply,
    LedgerReply,
    LettersReply,
    LetterView,
    ListCaptures,
    ListDeadQueues,
    ListFailed,
    ListGroups,
    ListMessages,
    ListRedrives,
    ListRevisions,
    ListTokens,
    MessagesReply,
    MessageView,
    PauseRedrive,
    PlanRedrive,
    QueueView,
    ReadBalance,
    ReadBody,
    ReadHead,
    ReadHistory,
    ReadLedger,
    ReadLetter,
    ReadPlan,
    ReadRedrive,
    RedriveQueue,
    RedriveQueueReply,
    RedrivesReply,
    ResolveLetters,
    RestoreLetters,
    ResumeRedrive,
    RevisionView,
    RevokeToken,
    SearchLetters,
    StartCapture,
    StartRedrive,
    TaskRequest,
    TokenReply,
    TokenView,
    Verified,
    VerifyLedger,
    WatchEvents,
)
from holdfast.core.selection import ID_MAX, Selection, check_selection, decode_cursor, encode_cursor
from holdfast.core.states import LetterState
from holdfast.errors import Forbidden, Invalid, NotFound
from holdfast.ports.blobs import Blobs
from holdfast.services.vault.access import TokenService
from holdfast.services.vault.custody import Custody, check_all_queues, check_queue
from holdfast.services.vault.ledgers import LedgerService
from holdfast.services.vault.planner import Planner
from holdfast.services.vault.redrive_tasks import RedriveRunner
from holdfast.services.vault.upkeep import Retention
from holdfast.stores.vault import Vault

HISTORY_COUNT_MAX = 1_000
EXPORT_PAGE_COUNT = 100
REDRIVE_TIMEOUT_S = 60.0
REDRIVE_STEP_S = 0.05
CAPTURE_IDLE_S = 0.5
#: So many letters are looked at, to find some that can go.
PASSED_OVER_MAX = 100_000
EVENTS_STEP_S = 1.0
EVENTS_COUNT_MAX = 3_600
EVENT_REDRIVES_COUNT_MAX = 20
ID_DIGITS_MAX = 20

R = TypeVar("R")
S = TypeVar("S", bound=Struct)

_encode = msgspec.json.Encoder().encode


class VaultApp:
    """Everything that the faces need of custody."""

    def __init__(
        self, custody: Custody, *, key: bytes, blobs: Blobs | None = None, redrive_role: Role = Role.OPERATOR
    ) -> None:
        self.custody = custody
        self.redrive_role = redrive_role
        self.retention = Retention(custody.vault, clock=custody.clock, blobs=blobs)
        self.vault: Vault = custody.vault
        self.planner = Planner(custody)
        self.redrives = RedriveRunner(custody)
        self.ledgers = LedgerService(custody.vault, key=key)
        self.tokens = TokenService(custody.vault, clock=custody.clock)

    @property
    def now_us(self) -> int:
        return self.custody.clock.now_us()

    def check(self, declared: Declared, caller: Caller) -> None:
        """Raises Forbidden when the caller's role is too low."""
        need = declared.needs(self.redrive_role)
        if caller.role < need:
            raise Forbidden(f"forbidden; '{declared.name}' needs the role {need.word}, you are {caller.role.word}")

    async def call(self, request: Request[R], caller: Caller) -> R:
        """Answer a request of somebody. Raises HoldfastError."""
        try:
            self.check(request.declared, caller)
            return await self.answer(request, caller)
        except Forbidden as error:
            names = {name: str(getattr(request, name)) for name in request.declared.in_path}
            await self.note_denied(request.declared, names, caller, error)
            raise

    async def answer(self, request: Request[R], caller: Caller) -> R:
        """Answer a request of somebody whose role was checked."""
        return cast(R, await HANDLERS[type(request)](self, request, caller))

    async def note_denied(self, declared: Declared, names: Mapping[str, str], caller: Caller, error: Forbidden) -> None:
        """Who was refused what change, and of which letter or queue, as far as the path says."""
        if not declared.is_change:
            return
        letter = names.get("id", "") if declared.path.startswith("/admin/letters/") else ""
        await self.vault.ledger.append(
            LedgerAct(actor=caller.name, action=declared.name, origin=caller.origin, detail=error.message),
            outcome="denied",
            queue=clip(names.get("queue", ""), NAME_CHARACTERS_MAX),
            letters=letter if letter.isascii() and letter.isdigit() and len(letter) < ID_DIGITS_MAX else "",
        )

    async def close(self) -> None:
        """End what runs, after the batch that it has in hand."""
        await self.custody.close()
        await self.redrives.close()


def act_of(request: Request[Any], caller: Caller, reason: str = "", detail: str = "") -> LedgerAct:
    """Who does what, for the ledger."""
    return LedgerAct(
        actor=caller.name, action=request.declared.name, origin=caller.origin, reason=reason, detail=detail
    )


def _view(kind: type[S], source: Struct) -> S:
    """What `kind` shows of a thing."""
    return kind(**{name: getattr(source, name) for name in kind.__struct_fields__})


def _without_nul(text: str) -> str:
    """No engine finds what has such a character."""
    return text.replace("\x00", "")


# --- dead-letter queues and captures --------------------------------------------------------------------------


@handles(ListDeadQueues)
async def _queues(app: VaultApp, request: ListDeadQueues, caller: Caller) -> list[QueueView]:
    return await app.custody.dead_queues(caller)


@handles(ListMessages)
async def _messages(app: VaultApp, request: ListMessages, caller: Caller) -> MessagesReply:
    check_queue(caller, request.queue)
    selection = Selection(queue=request.queue, state=LetterState.CAPTURED)
    waiting = await app.custody.waiting(request.queue, caller)
    if not request.live and (await app.vault.letters.count(selection)).count:
        page = await app.vault.letters.find(selection, count_max=request.limit)
        found = [MessageView.of(one, (await app.custody.content(one)).body) for one in page.letters]
        return MessagesReply(source="vault", messages=found, cost="none: read from the vault", waiting=waiting)
    letters = await app.custody.peek(request.queue, caller, count_max=request.limit, live=request.live)
    cost = "each letter was delivered once and given back; where the queue counts that, it counted"
    views = [MessageView.of(one, one.body) for one in letters]
    return MessagesReply(source="live", messages=views, cost=cost, waiting=waiting)


@handles(RedriveQueue)
async def _redrive_queue(app: VaultApp, request: RedriveQueue, caller: Caller) -> RedriveQueueReply:
    """Into the vault, then out of it: committed, then acked; confirmed, then settled."""
    queue, limit = request.queue, request.limit
    await app.custody.known(queue, caller)
    plan = await _oldest_that_can_go(app, caller, queue, limit)
    if (plan.count if plan else 0) < limit and not app.custody.is_capturing(queue):
        count = limit - (plan.count if plan else 0)
        await app.custody.capture(queue, caller, count_max=count, idle_s=CAPTURE_IDLE_S)
        plan = await _oldest_that_can_go(app, caller, queue, limit)
    if plan is None:
        return RedriveQueueReply(redriven=0, kept=0, possible_duplicates=0, reasons={})
    reasons, left_out_count = Counter({one.why: one.count for one in plan.reasons}), plan.left_out_count
    if not plan.count:
        return RedriveQueueReply(redriven=0, kept=left_out_count, possible_duplicates=0, reasons=dict(reasons))
    if plan.count > limit:
        plan = await _planned(app, caller, queue, expand(plan.ids)[:limit])
    act = act_of(request, caller, reason="re-drive")
    task, _ = await app.planner.execute(plan.hash, caller, act, name=f"re-drive of {queue}"[:200])
    app.redrives.begin(task)
    deadline = asyncio.get_running_loop().time() + REDRIVE_TIMEOUT_S
    while (task := await app.redrives.find(task.id)).state is RedriveState.RUNNING:
        if asyncio.get_running_loop().time() > deadline:
            reasons[f"still under way, see /admin/redrives/{task.id}"] += task.total - task.redriven
            break
        await asyncio.sleep(REDRIVE_STEP_S)
    if task.failed:
        reasons["the broker did not take it"] += task.failed
    return RedriveQueueReply(
        redriven=task.redriven,
        kept=left_out_count + task.total - task.redriven,
        possible_duplicates=max(task.possible_duplicates, task.unknown),
        reasons=dict(reasons),
    )


async def _oldest_that_can_go(app: VaultApp, caller: Caller, queue: str, limit: int) -> Plan | None:
    """What cannot go is passed over, or it would be in the way of all others for ever. None when there is no letter."""
    selection = Selection(queue=queue, state=LetterState.CAPTURED)
    count = limit
    while True:
        found = await app.vault.letters.oldest_ids(selection, count_max=count)
        if not found:
            return None
        plan = await _planned(app, caller, queue, [one for one, _ in found])
        if plan.count >= limit or len(found) < count or count >= PASSED_OVER_MAX:
            return plan
        count = min(count * 10, PASSED_OVER_MAX)


async def _planned(app: VaultApp, caller: Caller, queue: str, ids: Sequence[int]) -> Plan:
    return await app.planner.plan(PlanOptions(selection=Selection(ids=tuple(ids), queue=queue)), caller)


@handles(ListCaptures)
async def _captures(app: VaultApp, request: ListCaptures, caller: Caller) -> list[CaptureReport]:
    return [one for one in app.custody.captures() if caller.may_touch(one.queue)]


@handles(StartCapture)
async def _capture(app: VaultApp, request: StartCapture, caller: Caller) -> CaptureReport:
    if request.continuous:
        return await app.custody.start_capture(request.queue, caller)
    return await app.custody.capture(request.queue, caller, count_max=request.limit, idle_s=CAPTURE_IDLE_S)


@handles(ListFailed)
async def _failed(app: VaultApp, request: ListFailed, caller: Caller) -> FailedReply:
    check_all_queues(caller)
    after = decode_cursor("failed", request.cursor) if request.cursor else 0
    found = await app.vault.letters.failed(after=after, count_max=request.limit)
    more = encode_cursor("failed", found[-1].id) if len(found) == request.limit else ""
    return FailedReply(failed=[_view(FailedView, one) for one in found], next=more)


# --- letters --------------------------------------------------------------------------------------------------


@handles(SearchLetters)
async def _search(app: VaultApp, request: SearchLetters, caller: Caller) -> LettersReply:
    selection = request.selection(app.now_us)
    check_queue(caller, selection.queue)
    before = decode_cursor("letters", request.cursor) if request.cursor else 0
    page = await app.vault.letters.find(selection, before=before, count_max=request.limit)
    count = await app.vault.letters.count(selection)
    return LettersReply(
        letters=[LetterView.of(one) for one in page.letters],
        count=count.count,
        count_is_exact=count.exact,
        next=encode_cursor("letters", page.after) if page.after else "",
        stopped=page.stopped,
    )


@handles(ArchiveLetters)
@handles(RestoreLetters)
@handles(DiscardLetters)
@handles(ResolveLetters)
async def _act(app: VaultApp, request: ActionRequest, caller: Caller) -> ActionReply:
    word = request.declared.name.removeprefix("letters.")
    act = act_of(request, caller, reason=request.reason)
    selection = request.selection.selection(app.now_us)
    return ActionReply(await app.custody.act(word, selection, expected=request.count, act=act, caller=caller))


@handles(ReadLetter)
async def _show_letter(app: VaultApp, request: ReadLetter, caller: Caller) -> LetterView:
    return LetterView.of(await app.custody.letter(request.id, caller))


@handles(ReadBody)
async def _body(app: VaultApp, request: ReadBody, caller: Caller) -> bytes:
    letter = await app.custody.letter(request.id, caller)
    return (await app.custody.content(letter, revision=0 if request.original else request.revision)).body


@handles(ListRevisions)
async def _revisions(app: VaultApp, request: ListRevisions, caller: Caller) -> list[RevisionView]:
    letter = await app.custody.letter(request.id, caller)
    return [_view(RevisionView, one) for one in await app.vault.letters.revisions(letter.id)]


@handles(EditLetter)
async def _edit(app: VaultApp, request: EditLetter, caller: Caller) -> EditReply:
    letter = await app.custody.letter(request.id, caller)
    body = request.body
    if request.restore:
        if body is not None or request.put or request.drop:
            raise Invalid("edit is invalid; restore goes with no other change")
        body = (await app.custody.content(letter, revision=0)).body
    number = await app.custody.edit(
        letter.id,
        caller,
        act_of(request, caller, reason=request.reason),
        revision=request.revision,
        body=body,
        put=request.put,
        drop=request.drop,
        sensitive=request.sensitive,
    )
    return EditReply(number)


@handles(ReadHistory)
async def _history(app: VaultApp, request: ReadHistory, caller: Caller) -> HistoryReply:
    letter = await app.custody.letter(request.id, caller)
    return HistoryReply(await app.vault.ledger.of_letter(letter.id, count_max=HISTORY_COUNT_MAX))


@handles(ExportLetters)
async def _export(app: VaultApp, request: ExportLetters, caller: Caller) -> Stream:
    selection = request.selection(app.now_us)
    check_selection(selection)
    check_queue(caller, selection.queue)
    return _lines(app, selection)


async def _lines(app: VaultApp, selection: Selection) -> Stream:
    before = 0
    while True:
        page = await app.vault.letters.find(selection, before=before, count_max=EXPORT_PAGE_COUNT)
        for letter in page.letters:
            content = await app.custody.content(letter)
            view = msgspec.to_builtins(LetterView.of(letter), builtin_types=())
            raw = {"body": content.body, "raw_properties": content.properties, "put": content.put, "drop": content.drop}
            yield _encode({**view, **raw}) + b"\n"
        if not page.after:
            return
        before = page.after


# --- groups, plans and redrives -------------------------------------------------------------------------------


@handles(ListGroups)
async def _groups(app: VaultApp, request: ListGroups, caller: Caller) -> GroupsReply:
    check_all_queues(caller)
    after = decode_cursor("groups", request.cursor) if request.cursor else ID_MAX
    status = GroupStatus(request.status) if request.status else None
    found = await app.vault.groups.page(status=status, after=after, count_max=request.limit)
    more = encode_cursor("groups", found[-1][0]) if len(found) == request.limit else ""
    return GroupsReply(groups=[_view(GroupView, group) for _, group in found], next=more)


@handles(ChangeGroup)
async def _change_group(app: VaultApp, request: ChangeGroup, caller: Caller) -> GroupView:
    check_all_queues(caller)
    status = GroupStatus(request.status) if request.status else None
    key, note = request.key, request.note
    act = act_of(request, caller, reason=note or "", detail=f"{key[:50]} {request.status or ''}")
    group = await app.vault.groups.change(key, status=status, note=note, act=act) if "\x00" not in key else None
    if group is None:
        raise NotFound(f"group does not exist; there is no group '{key[:50]}'")
    return _view(GroupView, group)


@handles(PlanRedrive)
async def _plan(app: VaultApp, request: PlanRedrive, caller: Caller) -> Plan:
    return await app.planner.plan(request.wish(app.now_us), caller)


@handles(ReadPlan)
async def _show_plan(app: VaultApp, request: ReadPlan, caller: Caller) -> Plan:
    return await app.planner.find(_without_nul(request.hash), caller)


@handles(StartRedrive)
async def _start_redrive(app: VaultApp, request: StartRedrive, caller: Caller) -> RedriveTask:
    redrive, _ = await app.planner.execute(
        _without_nul(request.plan),
        caller,
        act_of(request, caller, reason=request.reason, detail=request.name),
        name=_without_nul(request.name),
        operation=_without_nul(request.operation),
    )
    app.redrives.begin(redrive)
    return redrive


@handles(ListRedrives)
async def _redrives(app: VaultApp, request: ListRedrives, caller: Caller) -> RedrivesReply:
    check_all_queues(caller)
    before = decode_cursor("redrives", request.cursor) if request.cursor else ID_MAX
    found = await app.vault.redrives.page(before=before, count_max=request.limit)
    more = encode_cursor("redrives", found[-1].id) if len(found) == request.limit else ""
    return RedrivesReply(redrives=found, next=more)


@handles(ReadRedrive)
async def _show_redrive(app: VaultApp, request: TaskRequest, caller: Caller) -> RedriveTask:
    redrive = await app.redrives.find(request.id)
    if redrive.wish.selection.queue:
        check_queue(caller, redrive.wish.selection.queue)
    else:
        check_all_queues(caller)
    return redrive


@handles(PauseRedrive)
@handles(ResumeRedrive)
@handles(CancelRedrive)
async def _change_redrive(app: VaultApp, request: TaskRequest, caller: Caller) -> RedriveTask:
    redrive = await _show_redrive(app, request, caller)
    word = request.declared.name.removeprefix("redrives.")
    return await app.redrives.change(redrive.id, word, act_of(request, caller, detail=f"redrive {redrive.id}"))


# --- ledger, tokens and events --------------------------------------------------------------------------------


@handles(ReadLedger)
async def _ledger(app: VaultApp, request: ReadLedger, caller: Caller) -> LedgerReply:
    check_all_queues(caller)
    after = decode_cursor("ledger", request.cursor) if request.cursor else 0
    rows = await app.vault.ledger.rows(after=after, count_max=request.limit)
    more = encode_cursor("ledger", rows[-1].number) if len(rows) == request.limit else ""
    return LedgerReply(rows=rows, next=more)


@handles(ReadHead)
async def _head(app: VaultApp, request: ReadHead, caller: Caller) -> HeadReply:
    return HeadReply(await app.ledgers.head())


@handles(VerifyLedger)
async def _verify(app: VaultApp, request: VerifyLedger, caller: Caller) -> Verified:
    return await app.ledgers.verify(anchor=request.anchor)


@handles(ReadBalance)
async def _balance(app: VaultApp, request: ReadBalance, caller: Caller) -> list[BalanceRow]:
    return [row for row in await app.ledgers.balance() if caller.may_touch(row.queue)]


@handles(ListTokens)
async def _tokens(app: VaultApp, request: ListTokens, caller: Caller) -> list[TokenView]:
    check_all_queues(caller)
    return [
        TokenView(
            name=one.name,
            role=one.role.word,
            made_at=one.made_at,
            made_by=one.made_by,
            expires_at=one.expires_at,
            revoked_at=one.revoked_at,
            queues=list(one.queues),
        )
        for one in await app.tokens.all()
    ]


@handles(CreateToken)
async def _create_token(app: VaultApp, request: CreateToken, caller: Caller) -> TokenReply:
    check_all_queues(caller)
    secret = await app.tokens.create(
        request.name,
        Role[request.role.upper()],
        act_of(request, caller, detail=f"{request.role} token '{request.name[:200]}'"),
        expires_at=request.expires_at(app.now_us),
        queues=request.queues,
    )
    return TokenReply(secret)


@handles(RevokeToken)
async def _revoke_token(app: VaultApp, request: RevokeToken, caller: Caller) -> ActionReply:
    check_all_queues(caller)
    name = _without_nul(request.name)
    await app.tokens.revoke(name, act_of(request, caller, detail=f"token '{name[:200]}'"))
    return ActionReply(1)


@handles(WatchEvents)
async def _events(app: VaultApp, request: WatchEvents, caller: Caller) -> Stream:
    check_all_queues(caller)
    return watch(app.vault)


async def watch(vault: Vault) -> Stream:
    """Arrivals (the tallies) and progress (the newest tasks), whenever they have changed; ends after an hour."""
    last: dict[str, bytes] = {}
    for _ in range(EVENTS_COUNT_MAX):
        found = {
            "tallies": _encode(await vault.ledger.tallies()),
            "redrives": _encode(await vault.redrives.page(before=2**62, count_max=EVENT_REDRIVES_COUNT_MAX)),
        }
        for name, data in found.items():
            if last.get(name) != data:
                yield b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
        last = found
        await asyncio.sleep(EVENTS_STEP_S)
