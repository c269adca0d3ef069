"""Everything below `/admin`, answered: one handler for each request of custody, recoveries and the topology, whether
HTTP, the console or the command line asks.

`VaultApp.call` lets a caller ask: it checks the role and the queues that a token is held to, and what a refused caller
wanted to change is in the ledger. A handler checks the queues of what is only known once it is found.
"""

from __future__ import annotations

import asyncio
import csv
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import cached_property
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from holdfast.core.ledger import LedgerAct, LedgerRow, expand
from holdfast.core.letter import NAME_CHARACTERS_MAX, GroupStatus, clip
from holdfast.core.moments import moment
from holdfast.core.plan import PLAN_COUNT_MAX, Plan, PlanOptions, RedriveState, RedriveTask, Target
from holdfast.core.requests import recover
from holdfast.core.requests import vault as requests
from holdfast.core.requests.declare import HANDLERS, Caller, Declared, Request, Role, Stream, handles, view
from holdfast.core.selection import ID_MAX, Selection, check_selection, decode_cursor, encode_cursor
from holdfast.core.states import LetterState
from holdfast.errors import Forbidden, HoldfastError, Invalid, NotFound
from holdfast.ports.blobs import Blobs
from holdfast.services.vault.access import RefusedCalls, TokenService
from holdfast.services.vault.custody import Custody
from holdfast.services.vault.overview import QueueOverview
from holdfast.services.vault.planner import Planner
from holdfast.services.vault.redrive_tasks import ACTOR, RedriveRunner
from holdfast.services.vault.upkeep import Retention
from holdfast.stores.vault import Vault
from holdfast.telemetry.events import emit

if TYPE_CHECKING:
    from holdfast.services.recover.server_runs import ServerRuns
    from holdfast.services.topology_watch import TopologyWatch

HISTORY_COUNT_MAX = 1_000
EXPORT_PAGE_COUNT = 100
#: So many of the newest letters are looked at for what letters can be found by, fewer for their headers; and so many
#: values are told of each field.
VALUES_OF_COUNT = 2_000
HEADERS_OF_COUNT = 200
VALUES_COUNT_MAX = 30
EXPORT_ROWS_COUNT = 500
FORMULA_MARKS = ("=", "+", "-", "@", "\t", "\r", "\n")
REDRIVE_TIMEOUT_S = 60.0
REDRIVE_STEP_S = 0.05
CAPTURE_IDLE_S = 0.5
#: So many letters are looked at, to find some that can go.
PASSED_OVER_MAX = 100_000
EVENTS_STEP_S = 1.0
UPKEEP_S = 30.0
EVENTS_COUNT_MAX = 3_600
EVENT_REDRIVES_COUNT_MAX = 20
ID_DIGITS_MAX = 20
#: A task in one of these goes on, or can.
UNDER_WAY = (RedriveState.RUNNING, RedriveState.PAUSED, RedriveState.STOPPED)
#: So many pages of a list are looked through for what is not of other queues.
OTHERS_PAGES_MAX = 20
#: Who does what a server does by itself.
SERVER = Caller(name=ACTOR, role=Role.ADMIN, origin="server")

R = TypeVar("R")

_encode = msgspec.json.Encoder().encode


class VaultApp:
    """What the faces ask for `/admin`, its pages and its commands."""

    def __init__(
        self,
        custody: Custody,
        *,
        make_runs: Callable[[], ServerRuns],
        make_watch: Callable[[], TopologyWatch],
        blobs: Blobs | None = None,
        redrive_role: Role = Role.OPERATOR,
        settings: Sequence[requests.SettingView] = (),
    ) -> None:
        """`settings` are what the server was started with, for those who may see them."""
        self._make_runs = make_runs
        self._make_watch = make_watch
        self.custody = custody
        self.settings = settings
        self.redrive_role = redrive_role
        self.retention = Retention(custody.vault, clock=custody.clock, blobs=blobs)
        self.vault: Vault = custody.vault
        self.planner = Planner(custody)
        self.redrives = RedriveRunner(custody)
        self.overview = QueueOverview(custody)
        self.tokens = TokenService(custody.vault, clock=custody.clock)
        self._refused = RefusedCalls()
        #: What is to end before the vault does.
        self.at_end: list[Callable[[], None]] = []

    @cached_property
    def recoveries(self) -> ServerRuns:
        """Those of this process; what they need is imported when the first one is asked for."""
        return self._make_runs()

    @property
    def recovery_changes(self) -> int:
        """Grows whenever there is something new of a recovery; to ask this imports nothing."""
        return self.recoveries.changes if "recoveries" in self.__dict__ else 0

    @cached_property
    def topology(self) -> TopologyWatch:
        """Of the broker of this installation; imported when it is asked for."""
        return self._make_watch()

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
        """Answer a request of somebody whose role was checked; here his queues are. Raises HoldfastError."""
        request.declared.check_queues(request, caller)
        return cast(R, await HANDLERS[type(request)](self, request, caller))

    async def note_denied(self, declared: Declared, names: Mapping[str, str], caller: Caller, error: Forbidden) -> None:
        """Who was refused what change, and of which letter or queue, as far as the path says; many are summed up."""
        if not declared.is_change or not self._refused.add(caller, declared.name):
            return
        letter = names.get("id", "") if declared.path.startswith("/admin/letters/") else ""
        await self.vault.ledger.append(
            LedgerAct(actor=caller.name, action=declared.name, origin=caller.origin, detail=error.message),
            outcome="denied",
            queue=clip(names.get("queue", ""), NAME_CHARACTERS_MAX),
            letters=letter if letter.isascii() and letter.isdigit() and len(letter) < ID_DIGITS_MAX else "",
        )

    @asynccontextmanager
    async def at_work(
        self,
        *,
        captures: Sequence[str],
        resolve_after_s: float,
        retention_s: Mapping[LetterState, float],
        accept_clock: bool = False,
    ) -> AsyncIterator[None]:
        """What a server does by itself: captures, tasks that go on, letters that are resolved or past retention.

        After a long gap nothing is deleted for a while, unless the clock is accepted: it may have jumped."""
        spared_until_us = 0 if accept_clock else await self.vault.ledger.spared_until_us()
        for queue in captures:
            self.custody.keep_capturing(queue, SERVER)
        await self.redrives.resume_all()
        work = self._keep_up(resolve_after_s, retention_s, spared_until_us)
        upkeep = asyncio.create_task(work, name="upkeep of the vault")
        try:
            yield
        finally:
            upkeep.cancel()
            await asyncio.wait([upkeep])

    async def _keep_up(
        self, resolve_after_s: float, retention_s: Mapping[LetterState, float], spared_until_us: int
    ) -> None:
        """Again and again; also what cancelled redrives had in hand, and tokens of other servers."""
        told = False
        while True:
            try:
                await self.redrives.release()
                if self.now_us < spared_until_us:
                    count = await self.retention.spare(resolve_after_s=resolve_after_s, retention_s=retention_s)
                    if count and not told:
                        emit("vault.deletions_wait", count=count, until=moment(spared_until_us))
                    told = True
                else:
                    await self.retention.run(resolve_after_s=resolve_after_s, retention_s=retention_s)
                await self.tokens.load()
                await self._sum_up()
            except HoldfastError as error:
                emit("vault.failed", error=error)
            await asyncio.sleep(UPKEEP_S)

    async def close(self) -> None:
        """End what runs, after the batch that it has in hand."""
        for end in self.at_end:
            end()
        await self.overview.close()
        if "recoveries" in self.__dict__:
            await self.recoveries.close()
        if "topology" in self.__dict__:
            await self.topology.close()
        await self.custody.close()
        await self.redrives.close()
        await self._sum_up()

    async def _sum_up(self) -> None:
        """The refused calls that have no row of their own, one row for each caller."""
        for act in self._refused.sum_up():
            await self.vault.ledger.append(act, outcome="denied")


def act_of(request: Request[Any], caller: Caller, reason: str = "", detail: str = "") -> LedgerAct:
    """Who does what, for the ledger."""
    return LedgerAct(
        actor=caller.name, action=request.declared.name, origin=caller.origin, reason=reason, detail=detail
    )


def _without_nul(text: str) -> str:
    """No engine finds what has such a character."""
    return text.replace("\x00", "")


# --- dead-letter queues and captures --------------------------------------------------------------------------


@handles(requests.ListDeadQueues)
async def _queues(app: VaultApp, request: requests.ListDeadQueues, caller: Caller) -> list[requests.QueueView]:
    return await app.custody.dead_queues(caller)


@handles(requests.ReadOverview)
async def _overview(app: VaultApp, request: requests.ReadOverview, caller: Caller) -> requests.OverviewReply:
    return await app.overview.read(caller)


@handles(requests.ReadOverviewHistory)
async def _hours(app: VaultApp, request: requests.ReadOverviewHistory, caller: Caller) -> requests.OverviewHistory:
    found = await app.vault.ledger.hours(request.hours)
    return replace(found, queues=[one for one in found.queues if caller.may_touch(one.queue)])


@handles(requests.ListMessages)
async def _messages(app: VaultApp, request: requests.ListMessages, caller: Caller) -> requests.MessagesReply:
    selection = Selection(queue=request.queue, state=LetterState.CAPTURED)
    waiting = await app.custody.waiting(request.queue, caller)
    if not request.live and (await app.vault.letters.count(selection)).count:
        page = await app.vault.letters.find(selection, count_max=request.limit)
        found = [requests.MessageView.of(one, (await app.custody.content(one)).body) for one in page.letters]
        return requests.MessagesReply(source="vault", messages=found, cost="none: read from the vault", waiting=waiting)
    letters = await app.custody.peek(request.queue, caller, count_max=request.limit, live=request.live)
    cost = "each letter was delivered once and given back; where the queue counts that, it counted"
    views = [requests.MessageView.of(one, one.body) for one in letters]
    return requests.MessagesReply(source="live", messages=views, cost=cost, waiting=waiting)


@handles(requests.RedriveQueue)
async def _redrive_queue(app: VaultApp, request: requests.RedriveQueue, caller: Caller) -> requests.RedriveQueueReply:
    """Into the vault, then out of it: committed, then acked; confirmed, then settled."""
    queue, limit = request.queue, request.limit
    broker, found = await app.custody.known(queue, caller)
    # The queue that the list of dead-letter queues shows for this one, where nothing surer is seen.
    is_named = caller.may_touch(found.source_queue) and not await broker.inspector.sources(queue, app.custody.names)
    kind: Literal["wait", "queue"] = "wait" if request.via == "retry" else "queue"
    target = Target(kind=kind, source=found.source_queue if is_named else "")
    plan = await _oldest_that_can_go(app, caller, queue, target, limit)
    if (plan.count if plan else 0) < limit and not app.custody.is_capturing(queue):
        count = limit - (plan.count if plan else 0)
        await app.custody.capture(queue, caller, count_max=count, idle_s=CAPTURE_IDLE_S)
        plan = await _oldest_that_can_go(app, caller, queue, target, limit)
    if plan is None:
        return requests.RedriveQueueReply(redriven=0, kept=0, possible_duplicates=0, reasons={})
    reasons, left_out_count = Counter({one.why: one.count for one in plan.reasons}), plan.left_out_count
    path = f"/admin/letters?queue={quote(queue, safe='')}&state=captured"
    left = requests.RedriveQueueReply(
        redriven=0,
        kept=left_out_count,
        possible_duplicates=0,
        reasons=dict(reasons),
        kept_in=path,
        kept_ids=[one.letter for one in plan.left_out],
    )
    if not plan.count:
        return left
    if plan.count > limit:
        plan = await _planned(app, caller, queue, target, expand(plan.ids)[:limit])
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
    kept = left_out_count + task.total - task.redriven
    return replace(
        left,
        redriven=task.redriven,
        kept=kept,
        possible_duplicates=max(task.possible_duplicates, task.unknown),
        reasons=dict(reasons),
        kept_in=path if kept else "",
    )


async def _oldest_that_can_go(app: VaultApp, caller: Caller, queue: str, target: Target, limit: int) -> Plan | None:
    """What cannot go is passed over, or it would be in the way of all others for ever. None when there is no letter."""
    selection = Selection(queue=queue, state=LetterState.CAPTURED)
    count = limit
    while True:
        found = await app.vault.letters.oldest_ids(selection, count_max=count)
        if not found:
            return None
        plan = await _planned(app, caller, queue, target, found)
        if plan.count >= limit or len(found) < count or count >= PASSED_OVER_MAX:
            return plan
        count = min(count * 10, PASSED_OVER_MAX)


async def _planned(app: VaultApp, caller: Caller, queue: str, target: Target, ids: Sequence[int]) -> Plan:
    wish = PlanOptions(selection=Selection(ids=tuple(ids), queue=queue), target=target)
    return await app.planner.plan(wish, caller)


@handles(requests.ListCaptures)
async def _captures(app: VaultApp, request: requests.ListCaptures, caller: Caller) -> list[requests.CaptureReport]:
    return [one for one in app.custody.captures() if caller.may_touch(one.queue)]


@handles(requests.StartCapture)
async def _capture(app: VaultApp, request: requests.StartCapture, caller: Caller) -> requests.CaptureReport:
    if request.continuous:
        return await app.custody.start_capture(request.queue, caller)
    return await app.custody.capture(request.queue, caller, count_max=request.limit, idle_s=CAPTURE_IDLE_S)


@handles(requests.ListFailed)
async def _failed(app: VaultApp, request: requests.ListFailed, caller: Caller) -> requests.FailedReply:
    after = decode_cursor("failed", request.cursor) if request.cursor else 0
    found = await app.vault.letters.failed(after=after, count_max=request.limit)
    more = encode_cursor("failed", found[-1].id) if len(found) == request.limit else ""
    return requests.FailedReply(failed=found, next=more)


# --- letters --------------------------------------------------------------------------------------------------


@handles(requests.SearchLetters)
async def _search(app: VaultApp, request: requests.SearchLetters, caller: Caller) -> requests.LettersReply:
    selection = request.selection(app.now_us)
    before = decode_cursor("letters", request.cursor) if request.cursor else 0
    page = await app.vault.letters.find(selection, before=before, count_max=request.limit)
    count = await app.vault.letters.count(selection)
    return requests.LettersReply(
        letters=[requests.LetterView.of(one) for one in page.letters],
        count=count.count,
        count_is_exact=count.exact,
        next=encode_cursor("letters", page.after) if page.after else "",
        stopped=page.stopped,
    )


@handles(requests.CountLetters)
async def _count(app: VaultApp, request: requests.CountLetters, caller: Caller) -> requests.CountReply:
    found = await app.vault.letters.count(request.selection(app.now_us), count_max=PLAN_COUNT_MAX)
    if not found.exact:
        raise Invalid(f"selection is too large; more than {PLAN_COUNT_MAX} letters fit, narrow it")
    return requests.CountReply(found.count)


@handles(requests.ListValues)
async def _values(app: VaultApp, request: requests.ListValues, caller: Caller) -> requests.ValuesReply:
    check_selection(Selection(queue=request.queue))
    found, groups, looked_at = await app.vault.letters.values(
        request.queue, count_max=VALUES_OF_COUNT, headers_count_max=HEADERS_OF_COUNT
    )
    queues: Counter[str] = Counter()
    for tally in await app.vault.ledger.tallies():
        if caller.may_touch(tally.queue) and tally.state != LetterState.DELETED.value:
            queues[tally.queue] += tally.count
    values = {name: dict(counts.most_common(VALUES_COUNT_MAX)) for name, counts in {"queue": queues, **found}.items()}
    return requests.ValuesReply(
        values=values,
        groups={key: clip(groups[key], NAME_CHARACTERS_MAX) for key in values["group"]},
        looked_at=looked_at,
    )


@handles(requests.ArchiveLetters)
@handles(requests.RestoreLetters)
@handles(requests.DiscardLetters)
@handles(requests.ResolveLetters)
async def _act(app: VaultApp, request: requests.ActionRequest, caller: Caller) -> requests.ActionReply:
    word = request.declared.name.removeprefix("letters.")
    act = act_of(request, caller, reason=request.reason)
    selection = request.selection.selection(app.now_us)
    return requests.ActionReply(await app.custody.act(word, selection, expected=request.count, act=act, caller=caller))


@handles(requests.ReadLetter)
async def _show_letter(app: VaultApp, request: requests.ReadLetter, caller: Caller) -> requests.LetterReply:
    letter = await app.custody.letter(request.id, caller)
    return view(
        requests.LetterReply,
        requests.LetterView.of(letter),
        origin=letter.origin,
        changed_at=moment(letter.changed_at_us),
        kinds=await app.custody.kinds(letter),
        came_back_as=[
            number for number, queue in await app.vault.letters.came_back_as(letter.id) if caller.may_touch(queue)
        ],
    )


@handles(requests.ReadBody)
async def _body(app: VaultApp, request: requests.ReadBody, caller: Caller) -> bytes:
    letter = await app.custody.letter(request.id, caller)
    revision = 0 if request.original else request.revision
    return await app.custody.part(letter, revision=revision, skip=request.skip, limit=request.limit)


@handles(requests.ListRevisions)
async def _revisions(app: VaultApp, request: requests.ListRevisions, caller: Caller) -> list[requests.RevisionView]:
    letter = await app.custody.letter(request.id, caller)
    return await app.vault.letters.revisions(letter.id)


@handles(requests.EditLetter)
async def _edit(app: VaultApp, request: requests.EditLetter, caller: Caller) -> requests.EditReply:
    act = act_of(request, caller, reason=request.reason)
    return requests.EditReply(await app.custody.edit(request, caller, act))


@handles(requests.ReadHistory)
async def _history(app: VaultApp, request: requests.ReadHistory, caller: Caller) -> requests.HistoryReply:
    letter = await app.custody.letter(request.id, caller)
    return requests.HistoryReply(await app.vault.ledger.of_letter(letter.id, count_max=HISTORY_COUNT_MAX))


@handles(requests.ExportLetters)
async def _export(app: VaultApp, request: requests.ExportLetters, caller: Caller) -> Stream:
    selection = request.selection(app.now_us)
    check_selection(selection)
    return _lines(app, selection)


async def _lines(app: VaultApp, selection: Selection) -> Stream:
    before = 0
    while True:
        page = await app.vault.letters.find(selection, before=before, count_max=EXPORT_PAGE_COUNT)
        for letter in page.letters:
            content = await app.custody.content(letter)
            view = msgspec.to_builtins(requests.LetterView.of(letter), builtin_types=())
            raw = {"body": content.body, "raw_properties": content.properties, "put": content.put, "drop": content.drop}
            yield _encode({**view, **raw}) + b"\n"
        if not page.after:
            return
        before = page.after


# --- groups, plans and redrives -------------------------------------------------------------------------------


@handles(requests.ListGroups)
async def _groups(app: VaultApp, request: requests.ListGroups, caller: Caller) -> requests.GroupsReply:
    after = decode_cursor("groups", request.cursor) if request.cursor else ID_MAX
    status = GroupStatus(request.status) if request.status else None
    found = await app.vault.groups.page(
        status=status,
        after=after,
        count_max=request.limit,
        text=_without_nul(request.text),
        first_after=request.first_after,
        first_before=request.first_before,
    )
    more = encode_cursor("groups", found[-1].sample) if len(found) == request.limit else ""
    if request.hours:
        arrived = await app.vault.groups.hours([group.key for group in found], request.hours)
        found = [replace(group, arrived=arrived[group.key]) for group in found]
    return requests.GroupsReply(groups=found, next=more)


@handles(requests.ReadGroup)
async def _group(app: VaultApp, request: requests.ReadGroup, caller: Caller) -> requests.GroupView:
    group = await app.vault.groups.find(_without_nul(request.key))
    if group is None:
        raise NotFound(f"group does not exist; there is no group '{request.key[:50]}'")
    if request.hours:
        arrived = await app.vault.groups.hours([group.key], request.hours)
        group = replace(group, arrived=arrived[group.key])
    return group


@handles(requests.ChangeGroup)
async def _change_group(app: VaultApp, request: requests.ChangeGroup, caller: Caller) -> requests.GroupView:
    status = GroupStatus(request.status) if request.status else None
    key, note = request.key, request.note
    act = act_of(request, caller, reason=note or "", detail=f"{key[:50]} {request.status or ''}")
    group = await app.vault.groups.change(key, status=status, note=note, act=act) if "\x00" not in key else None
    if group is None:
        raise NotFound(f"group does not exist; there is no group '{key[:50]}'")
    return group


@handles(requests.PlanRedrive)
async def _plan(app: VaultApp, request: requests.PlanRedrive, caller: Caller) -> Plan:
    return await app.planner.plan(request.wish(app.now_us), caller)


@handles(requests.ReadPlan)
async def _show_plan(app: VaultApp, request: requests.ReadPlan, caller: Caller) -> Plan:
    return await app.planner.find(_without_nul(request.hash), caller)


@handles(requests.StartRedrive)
async def _start_redrive(app: VaultApp, request: requests.StartRedrive, caller: Caller) -> RedriveTask:
    redrive, _ = await app.planner.execute(
        _without_nul(request.plan),
        caller,
        act_of(request, caller, reason=request.reason, detail=request.name),
        name=_without_nul(request.name),
        operation=_without_nul(request.operation),
    )
    app.redrives.begin(redrive)
    return redrive


@handles(requests.ListRedrives)
async def _redrives(app: VaultApp, request: requests.ListRedrives, caller: Caller) -> requests.RedrivesReply:
    before = decode_cursor("redrives", request.cursor) if request.cursor else ID_MAX
    states = [one for one in RedriveState if request.under_way in (None, one in UNDER_WAY)]
    found: list[RedriveTask] = []
    for _ in range(1 if not caller.queues else OTHERS_PAGES_MAX):
        page = await app.vault.redrives.page(
            before=before, count_max=request.limit, states=states, plan=_without_nul(request.plan)
        )
        found += [one for one in page if caller.may_see(one.wish.selection.queue)]
        before = page[-1].id if len(page) == request.limit else 0
        if not before or len(found) >= request.limit:
            break
    if len(found) > request.limit:  # of the last page not all are shown
        found = found[: request.limit]
        before = found[-1].id
    return requests.RedrivesReply(redrives=found, next=encode_cursor("redrives", before) if before else "")


@handles(requests.ReadRedrive)
async def _show_redrive(app: VaultApp, request: requests.TaskRequest, caller: Caller) -> RedriveTask:
    redrive = await app.redrives.find(request.id)
    caller.check_queue(redrive.wish.selection.queue)
    return redrive


@handles(requests.ListRedriveLetters)
async def _redrive_letters(
    app: VaultApp, request: requests.ListRedriveLetters, caller: Caller
) -> requests.RedriveLettersReply:
    redrive = await _show_redrive(app, requests.ReadRedrive(id=request.id), caller)
    after = decode_cursor("redrive letters", request.cursor) if request.cursor else 0
    outcome = request.outcome or None
    store, limit = app.vault.redrives, request.limit
    found = await store.letters(redrive.id, outcome, after=after, count_max=limit)
    reasons = await store.reasons(redrive.id, outcome) if outcome else []
    more = encode_cursor("redrive letters", found[-1].letter) if len(found) == limit else ""
    return requests.RedriveLettersReply(letters=found, reasons=reasons, next=more)


@handles(requests.PauseRedrive)
@handles(requests.ResumeRedrive)
@handles(requests.CancelRedrive)
async def _change_redrive(app: VaultApp, request: requests.TaskRequest, caller: Caller) -> RedriveTask:
    redrive = await _show_redrive(app, request, caller)
    caller.check_places(redrive.wish.target)
    word = request.declared.name.removeprefix("redrives.")
    return await app.redrives.change(redrive.id, word, act_of(request, caller, detail=f"redrive {redrive.id}"))


# --- recoveries -----------------------------------------------------------------------------------------------


@handles(recover.ListRecoveries)
async def _recoveries(app: VaultApp, request: recover.ListRecoveries, caller: Caller) -> recover.RecoveriesReply:
    return await app.recoveries.page(request, caller)


@handles(recover.PreflightRecovery)
async def _preflight(app: VaultApp, request: recover.PreflightRecovery, caller: Caller) -> recover.PreflightView:
    return await app.recoveries.preflight(request, caller)


@handles(recover.StartRecovery)
async def _start_recovery(app: VaultApp, request: recover.StartRecovery, caller: Caller) -> recover.RecoveryView:
    begun = await app.recoveries.start(request, caller)
    await _noted(app, request, caller, begun)
    return begun


@handles(recover.ReadRecovery)
async def _show_recovery(app: VaultApp, request: recover.ReadRecovery, caller: Caller) -> recover.RecoveryView:
    return await app.recoveries.find(request.run, caller)


@handles(recover.StopRecovery)
async def _stop_recovery(app: VaultApp, request: recover.StopRecovery, caller: Caller) -> recover.RecoveryView:
    stopped = await app.recoveries.stop(request.run, caller)
    await _noted(app, request, caller, stopped)
    return stopped


async def _noted(app: VaultApp, request: Request[Any], caller: Caller, told: recover.RecoveryView) -> None:
    """Who started or stopped it, and from where; its own row is written at its end."""
    act = act_of(request, caller, detail=f"recovery {told.recovery.run}{' (dry run)' if told.recovery.dry_run else ''}")
    await app.vault.ledger.append(act, outcome="done", queue=told.recovery.queue)


@handles(recover.ReadTopology)
async def _topology(app: VaultApp, request: recover.ReadTopology, caller: Caller) -> recover.TopologyReply:
    return await app.topology.read(request)


# --- ledger, tokens and events --------------------------------------------------------------------------------


@handles(requests.ReadLedger)
async def _ledger(app: VaultApp, request: requests.ReadLedger, caller: Caller) -> requests.LedgerReply:
    after = decode_cursor("ledger", request.cursor) if request.cursor else 0
    page = await app.vault.ledger.find(request, after=after, newest_first=request.newest_first, count_max=request.limit)
    return requests.LedgerReply(rows=page.rows, next=encode_cursor("ledger", page.after) if page.after else "")


@handles(requests.ExportLedger)
async def _export_ledger(app: VaultApp, request: requests.ExportLedger, caller: Caller) -> Stream:
    return _ledger_table(app, request)


async def _ledger_table(app: VaultApp, request: requests.ExportLedger) -> Stream:
    after, names = 0, [one for one in LedgerRow.__struct_fields__ if one != "mac"]
    text = StringIO()
    table = csv.writer(text)
    table.writerow(names)
    while True:
        page = await app.vault.ledger.find(request, after=after, newest_first=False, count_max=EXPORT_ROWS_COUNT)
        for row in page.rows:
            table.writerow([_cell(getattr(row, name)) for name in names])
        yield text.getvalue().encode("utf-8", "replace")
        text.seek(0)
        text.truncate()
        if not page.after:
            return
        after = page.after


def _cell(value: object) -> object:
    """A spreadsheet takes what begins so for a formula, and runs it: a quote makes it a text."""
    if isinstance(value, datetime):
        return value.isoformat()
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_MARKS) else value


@handles(requests.ReadHead)
async def _head(app: VaultApp, request: requests.ReadHead, caller: Caller) -> requests.HeadReply:
    return requests.HeadReply(await app.vault.ledger.head())


@handles(requests.VerifyLedger)
async def _verify(app: VaultApp, request: requests.VerifyLedger, caller: Caller) -> requests.Verified:
    return await app.custody.verify(request.anchor)


@handles(requests.ReadBalance)
async def _balance(app: VaultApp, request: requests.ReadBalance, caller: Caller) -> list[requests.BalanceRow]:
    return [row for row in await app.vault.ledger.balance() if caller.may_touch(row.queue)]


@handles(requests.ReadSettings)
async def _settings(app: VaultApp, request: requests.ReadSettings, caller: Caller) -> Sequence[requests.SettingView]:
    return app.settings


@handles(requests.ListTokens)
async def _tokens(app: VaultApp, request: requests.ListTokens, caller: Caller) -> list[requests.TokenView]:
    return [view(requests.TokenView, one, role=one.role.word) for one in await app.tokens.all()]


@handles(requests.CreateToken)
async def _create_token(app: VaultApp, request: requests.CreateToken, caller: Caller) -> requests.TokenReply:
    act = act_of(request, caller, detail=f"{request.role} token '{request.name[:200]}'")
    return requests.TokenReply(await app.tokens.create(request, act))


@handles(requests.RevokeToken)
async def _revoke_token(app: VaultApp, request: requests.RevokeToken, caller: Caller) -> requests.ActionReply:
    name = _without_nul(request.name)
    await app.tokens.revoke(name, act_of(request, caller, detail=f"token '{name[:200]}'"))
    return requests.ActionReply(1)


@handles(requests.WatchEvents)
async def _events(app: VaultApp, request: requests.WatchEvents, caller: Caller) -> Stream:
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
