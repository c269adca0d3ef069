"""Plan, then execute: a plan freezes which letters go where; executing does exactly that, or says what has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from holdfast.core.ledger import Act, expand, ranges
from holdfast.core.letter import Letter
from holdfast.core.letter_selection import Selection
from holdfast.core.message import Address
from holdfast.core.moments import moment
from holdfast.core.redrive_task import (
    NAME_CHARACTERS_MAX,
    PLAN_COUNT_MAX,
    REASON_CHARACTERS_MAX,
    UNROUTED_SHOWN_MAX,
    Plan,
    Redrive,
    Unrouted,
    Wish,
    check_wish,
    plan_hash,
)
from holdfast.core.roles import Caller
from holdfast.core.states import LetterState
from holdfast.errors import Conflict, Invalid, NotFound
from holdfast.ports.custody import Post
from holdfast.services.vault.custody import Custody, check_queue

PAGE_COUNT = 1_000
#: What a redrive without a rate limit is taken to reach, for the estimate.
RATE_PER_S_ASSUMED = 2_000
SEPARATOR = "\x1f"


class Planner:
    """Makes plans and starts their tasks."""

    def __init__(self, custody: Custody) -> None:
        self._custody = custody

    async def plan(self, wish: Wish, caller: Caller) -> Plan:
        """Look at every letter and every target; nothing is changed but that the plan is kept."""
        wish = msgspec.json.decode(msgspec.json.encode(wish), type=Wish)  # 2 and 2.0 are one wish, and one hash
        check_wish(wish)
        check_queue(caller, wish.selection.queue)
        if wish.selection == Selection():
            raise Invalid("plan is invalid; the selection is empty, name ids, a group or a filter")
        going, left_out, before = self._sorted(wish, await self._letters(wish.selection))
        notes = self._canary_notes(wish, going)
        targets = Counter(str(address) for _, address, _ in going)
        for post in self._custody.posts:
            addresses = [address for _, address, at in going if at is post]
            for address, why in (await post.check(addresses)).items():
                notes.append(f"{address} does not route: {why}")
                left_out += [Unrouted(one.id, f"{address} does not route") for one, to, _ in going if to == address]
                going = [entry for entry in going if entry[1] != address]
                targets.pop(str(address), None)
        rate = wish.max_per_s or RATE_PER_S_ASSUMED
        plan = Plan(
            hash=plan_hash(wish, [(one.id, one.revision, pack(address)) for one, address, _ in going]),
            wish=wish,
            ids=ranges([one.id for one, _, _ in going]),
            count=len(going),
            targets=dict(targets),
            left_out=tuple(left_out[:UNROUTED_SHOWN_MAX]),
            left_out_count=len(left_out),
            redriven_before=before,
            estimated_s=round(len(going) / rate, 3),
            notes=tuple(notes),
            made_at=moment(self._custody.clock.now_us()),
            made_by=caller.name,
        )
        await self._custody.vault.redrives.keep_plan(plan)
        return plan

    def _sorted(
        self, wish: Wish, letters: Sequence[Letter]
    ) -> tuple[list[tuple[Letter, Address, Post]], list[Unrouted], int]:
        going: list[tuple[Letter, Address, Post]] = []
        left_out: list[Unrouted] = []
        before = 0
        for letter in letters:
            before += letter.redriven_count > 0
            if letter.state is not LetterState.CAPTURED:
                left_out.append(Unrouted(letter.id, f"it is {letter.state.value}"))
                continue
            if letter.redriven_count >= wish.redrives_max and not wish.force:
                why = f"it was redriven {letter.redriven_count} times, which is the limit; force it if you mean it"
                left_out.append(Unrouted(letter.id, why))
                continue
            post = _post_for(letter, self._custody.posts)
            address, why = post.route(letter, wish.target) if post else (None, "its broker is not configured here")
            if post is None or address is None:
                left_out.append(Unrouted(letter.id, why))
            else:
                going.append((letter, address, post))
        return going, left_out, before

    async def _letters(self, selection: Selection) -> list[Letter]:
        letters: list[Letter] = []
        before = 0
        while True:
            page = await self._custody.vault.letters.find(selection, before=before, count_max=PAGE_COUNT)
            letters += page.letters
            if len(letters) > PLAN_COUNT_MAX:
                raise Invalid(f"plan is too large; more than {PLAN_COUNT_MAX} letters fit, narrow the selection")
            if not page.after:
                return letters[::-1]
            before = page.after

    async def _frozen(self, plan: Plan) -> list[Letter]:
        """The letters of a plan as they are now; what arrived since then is none of its business."""
        ids = expand(plan.ids)
        found: list[Letter] = []
        for start in range(0, len(ids), PAGE_COUNT):
            found += await self._letters(Selection(ids=tuple(ids[start : start + PAGE_COUNT])))
        return found

    def _canary_notes(self, wish: Wish, going: Sequence[tuple[Letter, Address, Post]]) -> list[str]:
        if wish.canary is None:
            return []
        for queue in {letter.queue for letter, _, _ in going}:
            if not self._custody.is_capturing(queue):
                raise Conflict(
                    f"canary is blind; nothing captures '{queue}', where letters would come back, start its capture"
                )
        return [f"a canary sends {wish.canary.first} first and stops above {wish.canary.stop_above:.0%} that come back"]

    async def find(self, found: str, caller: Caller) -> Plan:
        """Raises NotFound."""
        plan = await self._custody.vault.redrives.plan(found)
        if plan is None:
            raise NotFound(f"plan does not exist; there is no plan {found[:64]}")
        check_queue(caller, plan.wish.selection.queue)
        return plan

    async def execute(
        self, found: str, caller: Caller, act: Act, *, name: str = "", operation: str = ""
    ) -> tuple[Redrive, bool]:
        """Start the task of a plan; the same operation id gives the same task. Raises Conflict for a changed world."""
        if len(name) > NAME_CHARACTERS_MAX or len(act.reason) > REASON_CHARACTERS_MAX:
            raise Invalid(f"redrive is invalid; a name has {NAME_CHARACTERS_MAX} characters at the most")
        plan = await self.find(found, caller)
        running = await self._same(operation)
        if running is not None:
            return running, False
        if not plan.count:
            raise Conflict("plan is empty; no letter of it can be redriven, see left_out")
        going, left_out, _ = self._sorted(plan.wish, await self._frozen(plan))
        if plan_hash(plan.wish, [(one.id, one.revision, pack(address)) for one, address, _ in going]) != plan.hash:
            example = f", for example letter {left_out[0].letter}: {left_out[0].why}" if left_out else ""
            raise Conflict(
                f"letters have changed; of {plan.count} letters of the plan {len(going)} can still go{example}; "
                "nothing was done, plan again"
            )
        self._canary_notes(plan.wish, going)
        letters = [(one.id, pack(address)) for one, address, _ in going]
        return await self._custody.vault.redrives.start(
            plan=plan, letters=letters, wish=plan.wish, name=name, operation=operation, act=act
        )

    async def _same(self, operation: str) -> Redrive | None:
        if not operation:
            return None
        return await self._custody.vault.redrives.by_operation(operation)


def pack(address: Address) -> str:
    """An address in one text, for the task's table."""
    return f"{address.exchange}{SEPARATOR}{address.routing_key}"


def unpack(text: str) -> Address:
    """The address again."""
    exchange, _, key = text.partition(SEPARATOR)
    return Address(exchange=exchange, routing_key=key)


def _post_for(letter: Letter, posts: Sequence[Post]) -> Post | None:
    return next((post for post in posts if post.origin == letter.origin), None)
