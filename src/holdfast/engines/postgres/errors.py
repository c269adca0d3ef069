"""How PostgreSQL's errors read: one translation, and never a password in a text."""

from __future__ import annotations

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import DiagnosticField, ExecStatus
from psycopg.pq.abc import PGresult

from holdfast.errors import HoldfastError, StorageFailed, Unstorable

#: What `holdfast.hold_queue` raises for a queue that is gone or was made anew.
QUEUE_MISSING_STATE = "HF404"

#: Classes of states that the data is to blame for: a value that is invalid, or beyond a limit.
_UNSTORABLE = ("22", "54")

_WHAT_HAPPENED = {
    "40P01": "a deadlock was broken up",
    "40001": "another transaction came first",
    "53100": "the disk is full",
    "53300": "it has too many connections",
    "25006": "the database is read-only",
    "55P03": "a lock was not given in time",
    "57P01": "it was shut down",
    "57P02": "it crashed and restarts",
    "57P03": "it is starting up",
}


class QueueGone(HoldfastError):
    """The generation is not in the database; the caller knows the queue's name."""


def place_of(url: str) -> str:
    """Where a URL leads, for people: user, host, port and database, and never the password."""
    try:
        parts = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        return "PostgreSQL"
    host = parts.get("host") or parts.get("hostaddr") or "the local socket"
    port = parts.get("port") or 5432
    user = parts.get("user") or "the system's user"
    return f"PostgreSQL at {host}:{port}, database '{parts.get('dbname') or user}', user '{user}'"


def failed(error: Exception, place: str) -> StorageFailed:
    """The connection did not come about or broke."""
    if isinstance(error, psycopg.ProgrammingError) and error.sqlstate is None:
        # libpq's text would quote the URL, with the password in it.
        return StorageFailed(f"storage failed; {place}: the URL is not a valid one, try again")
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    what = _WHAT_HAPPENED.get(state or "") or _first_line(error) or "the connection is lost"
    if isinstance(error, psycopg.DataError) or (state or "")[:2] in _UNSTORABLE:
        return Unstorable(f"storage failed; {place}: {what}")
    return StorageFailed(f"storage failed; {place}: {what}, try again")


def refused(result: PGresult, place: str) -> HoldfastError:
    """The server answered with an error."""
    if result.status == ExecStatus.PIPELINE_ABORTED:
        return StorageFailed(f"storage failed; {place}: an earlier statement failed, try again")
    state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode("ascii", "replace")
    if state == QUEUE_MISSING_STATE:
        return QueueGone("queue is gone")
    text = (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or b"").decode("utf-8", "replace")
    what = _WHAT_HAPPENED.get(state) or text or "the connection is lost"
    return StorageFailed(f"storage failed; {place}: {what}, try again")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else ""
