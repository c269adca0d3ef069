"""Plan, then execute: a plan freezes which letters go where; executing does exactly that, or says what has changed.

How many letters may go next is by the rate, and by what the canary has seen come back so far: it watches the
dead-letter queues where its letters would come back. `auto` is as long as a letter that fails every attempt takes until
it is there, and a little more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from holdfast.core.death import where_it_died
from holdfast.core.ledger import LedgerAct, expand, ranges
from holdfast.core.letter import Letter
from holdfast.core.message import Address
from holdfast.core.moments import SECOND_US, format_duration, moment, parse_duration
from holdfast.core.plan import (
    NAME_CHARACTERS_MAX,
    PLAN_COUNT_MAX,
    REASON_CHARACTERS_MAX,
    UNROUTED_SHOWN_MAX,
    LeftOut,
    Plan,
    PlanOptions,
    RedriveTask,
    Unrouted,
    check_wish,
    plan_hash,
)
from holdfast.core.requests.declare import Caller
from holdfast.core.routes import RouteTable, route_letter, route_table
from holdfast.core.selection import Selection
from holdfast.core.states import LetterState
from holdfast.errors import Conflict, Forbidden, Invalid, NotFound
from holdfast.ports.broker import Broker, Reach
from holdfast.services.vault.custody import Custody
from holdfast.stores.redrives import pack

NO_BROKER = "its broker is not configured here"
#: What `auto` adds to the retry ladder of the target.
MARGIN_S = 30.0
PAGE_COUNT = 1_000
#: What a redrive without a rate limit is taken to reach, for the estimate.
RATE_PER_S_ASSUMED = 2_000


class PlannedLetter(NamedTuple):
    """A letter that can go."""

    letter: int
    revision: int
    queue: str
    source_queue: str
    address: Address
    broker: Broker


_Sorted: TypeAlias = tuple[list[PlannedLetter], list[Unrouted], int]


async def canary_wait(
    custody: Custody, wish: PlanOptions, going: Sequence[PlannedLetter], reached: Mapping[Address, Reach]
) -> str:
    """How long the canary of a plan watches; "" without one. Raises Conflict when it would see nothing."""
    if wish.canary is None or not going:
        return ""
    ways = {(one.queue, one.source_queue, one.address) for one in going}
    dead: dict[str, list[str]] = {}
    for broker in {one.broker for one in going}:
        for found in await broker.inspector.queues():
            dead.setdefault(found.source_queue, []).append(found.queue)
    for queue, source, address in sorted(ways, key=str):
        # Sent into the wait queue or by an exchange, it is tried in the queue that it died in, as far as we know.
        targets = (address.routing_key,) if not address.exchange else reached.get(address, Reach()).queues or (source,)
        returns = {one for target in targets for one in ([queue] if target == source else dead.get(target, []))}
        _check_watched(custody, returns or {queue}, known=bool(returns) or bool(address.exchange), target=str(address))
    if wish.canary.wait != "auto":
        return wish.canary.wait
    longest = MARGIN_S
    for broker in {one.broker for one in going}:
        addresses = list({one.address: None for one in going if one.broker is broker})
        ladder_s = await broker.inspector.ladder_s(addresses)
        if ladder_s is None:
            raise Conflict(
                "canary cannot tell how long to watch; nothing says after which delays consumers of the target try "
                'again, give the duration ("wait": "90s"), or set retry_delay and retry_attempts'
            )
        longest = max(longest, ladder_s + MARGIN_S)
    return format_duration(round(longest) * SECOND_US)


def _check_watched(custody: Custody, queues: set[str], *, known: bool, target: str) -> None:
    if not known:
        raise Conflict(f"canary is blind; nothing says where letters that die in '{target}' come back")
    for queue in sorted(queues):
        if not custody.is_capturing(queue):
            raise Conflict(
                f"canary is blind; nothing captures '{queue}', where letters would come back, start its capture"
            )


def canary_note(wish: PlanOptions, wait: str) -> list[str]:
    """What the canary of a plan will do, for people."""
    canary = wish.canary
    if canary is None or not wait:
        return []
    part = f"{canary.stop_above:.0%}"
    return [f"a canary sends {canary.first} first, watches for {wait}, and stops when more than {part} come back"]


class Planner:
    """Makes plans and starts their tasks."""

    def __init__(self, custody: Custody) -> None:
        self._custody = custody

    async def plan(self, wish: PlanOptions, caller: Caller) -> Plan:
        """Look at every letter and every target; nothing is changed but that the plan is kept."""
        wish = msgspec.json.decode(msgspec.json.encode(wish), type=PlanOptions)  # 2 and 2.0 are one wish, and one hash
        check_wish(wish)
        if wish.selection == Selection():
            raise Invalid("plan is invalid; the selection is empty, name ids, a group or a filter")
        pages = self._pages(wish.selection)
        going, left_out, before = await self._sorted(wish, pages)
        going.reverse()  # pages come newest first
        reached = await self._reached(going)
        going, unreached = _parted(going, reached)
        going, barred = await _permitted(caller, going, reached)
        wait = await canary_wait(self._custody, wish, going, reached)
        left_out = [*left_out[::-1], *unreached, *barred]
        plan = Plan(
            hash=_hash(wish, going),
            wish=wish,
            ids=ranges([one.letter for one in going]),
            count=len(going),
            targets=dict(Counter(str(one.address) for one in going)),
            left_out=tuple(left_out[:UNROUTED_SHOWN_MAX]),
            left_out_count=len(left_out),
            reasons=_reasons(left_out),
            redriven_before=before,
            estimated_s=round(len(going) / (wish.max_per_s or RATE_PER_S_ASSUMED) + _watched_s(wish, wait, going), 3),
            notes=(*_notes(going, reached), *canary_note(wish, wait)),
            made_at=moment(self._custody.clock.now_us()),
            made_by=caller.name,
            copies={str(to): list(reach.queues) for to, reach in reached.items() if to.exchange and reach.queues},
            canary_wait=wait,
        )
        await self._custody.vault.redrives.keep_plan(plan)
        return plan

    async def _reached(self, going: Sequence[PlannedLetter]) -> dict[Address, Reach]:
        found: dict[Address, Reach] = {}
        for broker in self._custody.brokers:
            addresses = {one.address: None for one in going if one.broker is broker}
            if addresses:
                found |= await broker.inspector.reach(list(addresses))
        return found

    async def _sorted(self, wish: PlanOptions, pages: AsyncIterator[Sequence[Letter]]) -> _Sorted:
        """Those that go, those that are left out, and how many were redriven before. Page by page, so that not all
        letters are in memory with their headers."""
        going: list[PlannedLetter] = []
        left_out: list[Unrouted] = []
        before = 0
        sources: dict[str, frozenset[str]] = {}
        table = route_table(wish.target, self._custody.names)
        async for letters in pages:
            for letter in letters:
                before += letter.redriven_count > 0
                found = self._placed(wish, table, letter, await self._sources(letter, sources))
                if isinstance(found, Unrouted):
                    left_out.append(found)
                else:
                    going.append(found)
        return going, left_out, before

    async def _sources(self, letter: Letter, known: dict[str, frozenset[str]]) -> frozenset[str]:
        """The queues that lead to its dead-letter queue; asked for by the first that does not tell where it died."""
        queue, names = letter.queue, self._custody.names
        if letter.origin == "queue" or queue in known or where_it_died(letter.headers, queue, names)[0] is not None:
            return known.get(queue, frozenset())
        broker = self._custody.broker_of(letter.origin)
        known[queue] = frozenset() if broker is None else await broker.inspector.sources(queue, names)
        return known[queue]

    def _placed(
        self, wish: PlanOptions, table: RouteTable, letter: Letter, sources: frozenset[str]
    ) -> PlannedLetter | Unrouted:
        if letter.state is not LetterState.CAPTURED:
            return Unrouted(letter.id, f"it is {letter.state.value}")
        if letter.redriven_count >= wish.redrives_max and not wish.force:
            why = f"it was redriven {letter.redriven_count} times, which is the limit; force it if you mean it"
            return Unrouted(letter.id, why)
        broker = self._custody.broker_of(letter.origin)
        if broker is None:
            return Unrouted(letter.id, NO_BROKER)
        address, why, source = route_letter(letter, wish.target, table, sources)
        if address is None:
            return Unrouted(letter.id, why)
        return PlannedLetter(letter.id, letter.revision, letter.queue, source, address, broker)

    async def _pages(self, selection: Selection) -> AsyncIterator[Sequence[Letter]]:
        count = before = 0
        while True:
            page = await self._custody.vault.letters.find(selection, before=before, count_max=PAGE_COUNT)
            count += len(page.letters)
            if count > PLAN_COUNT_MAX:
                raise Invalid(f"plan is too large; more than {PLAN_COUNT_MAX} letters fit, narrow the selection")
            yield page.letters
            if not page.after:
                return
            before = page.after

    async def _frozen(self, plan: Plan) -> AsyncIterator[Sequence[Letter]]:
        """The letters of a plan as they are now; what arrived since then is none of its business."""
        ids = expand(plan.ids)
        for start in range(0, len(ids), PAGE_COUNT):
            async for page in self._pages(Selection(ids=tuple(ids[start : start + PAGE_COUNT]))):
                yield page[::-1]

    async def find(self, found: str, caller: Caller) -> Plan:
        """Raises NotFound."""
        plan = await self._custody.vault.redrives.plan(found)
        if plan is None or plan.hash != found:  # another one was put in its place
            raise NotFound(f"plan does not exist; there is no plan {found[:64]}")
        caller.check_queue(plan.wish.selection.queue)
        return plan

    async def execute(
        self, found: str, caller: Caller, act: LedgerAct, *, name: str = "", operation: str = ""
    ) -> tuple[RedriveTask, bool]:
        """Start the task of a plan; the same operation id gives the same task. Raises Conflict for a changed world."""
        if len(name) > NAME_CHARACTERS_MAX or len(act.reason) > REASON_CHARACTERS_MAX:
            raise Invalid(f"redrive is invalid; a name has {NAME_CHARACTERS_MAX} characters at the most")
        plan = await self.find(found, caller)
        caller.check_places(plan.wish.target)
        running = await self._same(operation, plan)
        if running is not None:
            return running, False
        if not plan.count:
            raise Conflict("plan is empty; no letter of it can be redriven, see left_out")
        going = await self._still_going(plan, caller)
        wish = plan.wish
        if wish.canary is not None and plan.canary_wait:
            wish = replace(wish, canary=replace(wish.canary, wait=plan.canary_wait))
        letters = [(one.letter, pack(one.address)) for one in going]
        return await self._custody.vault.redrives.start(
            plan=plan, letters=letters, wish=wish, name=name, operation=operation, act=act
        )

    async def _still_going(self, plan: Plan, caller: Caller) -> list[PlannedLetter]:
        """The plan's letters, if all of them can still go as planned. Raises Conflict, Forbidden."""
        going, left_out, _ = await self._sorted(plan.wish, self._frozen(plan))
        if _hash(plan.wish, going) != plan.hash:
            example = f", for example letter {left_out[0].letter}: {left_out[0].why}" if left_out else ""
            raise Conflict(
                f"letters have changed; of {plan.count} letters of the plan {len(going)} can still go{example}; "
                "nothing was done, plan again"
            )
        reached = await self._reached(going)
        _, unreached = _parted(going, reached)
        if unreached:
            raise Conflict(
                f"targets have changed; {len(unreached)} of {plan.count} letters have no way any more, for example "
                f"letter {unreached[0].letter}: {unreached[0].why}; nothing was done, plan again"
            )
        _, barred = await _permitted(caller, going, reached)
        if barred:
            raise Forbidden(f"forbidden; letter {barred[0].letter}: {barred[0].why}; nothing was done")
        await canary_wait(self._custody, plan.wish, going, reached)
        return going

    async def _same(self, operation: str, plan: Plan) -> RedriveTask | None:
        """The task that this operation id has started. Raises Conflict when it was for another plan."""
        found = await self._custody.vault.redrives.by_operation(operation) if operation else None
        if found is not None and found.plan != plan.hash:
            raise Conflict(f"operation id is taken; it started redrive {found.id} of another plan, use a new one")
        return found


def _parted(
    going: Sequence[PlannedLetter], reached: dict[Address, Reach]
) -> tuple[list[PlannedLetter], list[Unrouted]]:
    """Those that would arrive, and those that would not, or would arrive in their own dead-letter queue."""
    arriving: list[PlannedLetter] = []
    left_out: list[Unrouted] = []
    for one in going:
        reach = reached.get(one.address, Reach())
        if reach.why:
            left_out.append(Unrouted(one.letter, f"{one.address} does not route"))
        elif one.queue in (reach.queues or ()):
            left_out.append(Unrouted(one.letter, f"{one.address} leads back to the dead-letter queue"))
        else:
            arriving.append(one)
    return arriving, left_out


async def _permitted(
    caller: Caller, going: Sequence[PlannedLetter], reached: Mapping[Address, Reach]
) -> tuple[list[PlannedLetter], list[Unrouted]]:
    """Those that a caller who is held to some queues may send, and those that would reach another one: where a letter
    says that it died is what somebody wrote. Which queue leads to the dead queue, the broker says."""
    if not caller.queues:
        return list(going), []
    homes = {
        (broker, found.queue): found.source_queue
        for broker in {one.broker for one in going}
        for found in await broker.inspector.queues()
    }
    permitted: list[PlannedLetter] = []
    barred: list[Unrouted] = []
    for one in going:
        queues = reached.get(one.address, Reach()).queues if one.address.exchange else (one.address.routing_key,)
        home = homes.get((one.broker, one.queue))
        others = [queue for queue in queues or () if queue != home and not caller.may_touch(queue)]
        if others or not queues:
            where = f"it would reach queue '{others[0]}'" if others else "nobody can say which queues get a copy"
            barred.append(Unrouted(one.letter, f"{caller.held}, and by {one.address} {where}"))
        else:
            permitted.append(one)
    return permitted, barred


def _watched_s(wish: PlanOptions, wait: str, going: Sequence[PlannedLetter]) -> float:
    """For how long the canary of a plan watches, all in all."""
    if wish.canary is None or not wait:
        return 0.0
    return wish.canary.watches(len(going)) * parse_duration(wait, what="canary wait") / SECOND_US


def _reasons(left_out: Sequence[Unrouted]) -> tuple[LeftOut, ...]:
    counts = Counter(one.why for one in left_out)
    samples = {one.why: one.letter for one in reversed(left_out)}
    return tuple(LeftOut(why, count, samples[why]) for why, count in counts.most_common())


def _notes(going: Iterable[PlannedLetter], reached: dict[Address, Reach]) -> list[str]:
    sources: dict[Address, set[str]] = {}
    for one in going:
        sources.setdefault(one.address, set()).add(one.source_queue)
    notes = [f"{to} does not route: {reach.why}" for to, reach in reached.items() if reach.why]
    notes += [reach.note for reach in reached.values() if reach.note]
    for to, ours in sources.items():
        queues = reached.get(to, Reach()).queues or ()
        others = [queue for queue in queues if queue not in ours]
        if to.exchange and others and len(queues) > 1:
            notes.append(f"{to} also gives a copy to {', '.join(others)}")
    return notes


def _hash(wish: PlanOptions, going: Sequence[PlannedLetter]) -> str:
    return plan_hash(wish, [(one.letter, one.revision, pack(one.address)) for one in going])
