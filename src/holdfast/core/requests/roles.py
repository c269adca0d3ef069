"""Who may do what: one table, for every verb of `/v1` and every endpoint of `/admin`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import IntEnum
from fnmatch import fnmatchcase

from msgspec import Struct


class Role(IntEnum):
    """Each may do what the ones before it may."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        return self.name.lower()


class Caller(Struct, frozen=True, kw_only=True):
    """Who a request comes from. `queues` are patterns; none means all queues."""

    name: str
    role: Role
    queues: tuple[str, ...] = ()
    origin: str = ""

    def may_touch(self, queue: str) -> bool:
        """Whether this caller's patterns let him at a queue."""
        return not self.queues or any(fnmatchcase(queue, pattern) for pattern in self.queues)


class Token(Struct, frozen=True, kw_only=True):
    """An API token as it is kept: never itself, only its hash."""

    name: str
    role: Role
    hash: str
    made_at: datetime
    made_by: str
    expires_at: datetime | None = None
    queues: tuple[str, ...] = ()
    revoked_at: datetime | None = None


_VIEWER, _OPERATOR, _ADMIN = Role.VIEWER, Role.OPERATOR, Role.ADMIN

#: Paths of /v1 that are no verbs, and whatever nobody has placed.
ELSEWHERE = _ADMIN
#: What each verb of the queue service and each endpoint needs.
NEEDS: Mapping[str, Role] = {
    "queue.produce": _OPERATOR,
    "queue.lease": _OPERATOR,
    "queue.complete": _OPERATOR,
    "queue.retry": _OPERATOR,
    "queue.extend": _OPERATOR,
    "queue.stats": _VIEWER,
    "queue.clear": _ADMIN,
    "queue.pause": _ADMIN,
    "queue.resume": _ADMIN,
    "queue.reload": _ADMIN,
    "queue.redrive": _OPERATOR,
    "queues.create": _ADMIN,
    "queues.update": _ADMIN,
    "queues.delete": _ADMIN,
    "queues.list": _VIEWER,
    "queues.info": _VIEWER,
    "storage/items.list": _OPERATOR,
    "storage/scheduled.list": _OPERATOR,
    "storage/items.import": _ADMIN,
    "storage/items.delete": _ADMIN,
    "results.list": _VIEWER,
    "results.show": _VIEWER,
    "results.gaps": _VIEWER,
    "results.read": _OPERATOR,
    "results.start": _OPERATOR,
    "results.abandon": _OPERATOR,
    "dlq.queues": _VIEWER,
    "dlq.messages": _OPERATOR,
    "dlq.redrive": _OPERATOR,
    "letters.search": _VIEWER,
    "letters.show": _VIEWER,
    "letters.body": _OPERATOR,
    "letters.revisions": _OPERATOR,
    "letters.edit": _ADMIN,
    "letters.history": _VIEWER,
    "letters.archive": _OPERATOR,
    "letters.restore": _OPERATOR,
    "letters.resolve": _OPERATOR,
    "letters.discard": _ADMIN,
    "groups.list": _VIEWER,
    "groups.change": _OPERATOR,
    "plans.make": _OPERATOR,
    "plans.show": _OPERATOR,
    "redrives.start": _OPERATOR,
    "redrives.list": _VIEWER,
    "redrives.show": _VIEWER,
    "redrives.pause": _OPERATOR,
    "redrives.resume": _OPERATOR,
    "redrives.cancel": _OPERATOR,
    "captures.list": _VIEWER,
    "captures.start": _OPERATOR,
    "imports.failed": _OPERATOR,
    "ledger.read": _OPERATOR,
    "ledger.head": _VIEWER,
    "ledger.verify": _OPERATOR,
    "balance.read": _VIEWER,
    "letters.export": _OPERATOR,
    "events.watch": _VIEWER,
    "session.open": _VIEWER,
    "session.show": _VIEWER,
    "session.close": _VIEWER,
    "tokens.create": _ADMIN,
    "tokens.list": _ADMIN,
    "tokens.revoke": _ADMIN,
}

#: What sends letters back, or says how far that goes: the settings may leave these to admins.
REDRIVES = frozenset(
    {
        "queue.redrive",
        "dlq.redrive",
        "plans.make",
        "plans.show",
        "redrives.start",
        "redrives.pause",
        "redrives.resume",
        "redrives.cancel",
    }
)


def needs(redrive_role: Role = _OPERATOR) -> Mapping[str, Role]:
    """The table for an installation in which redriving takes this role."""
    return {name: max(role, redrive_role) if name in REDRIVES else role for name, role in NEEDS.items()}
