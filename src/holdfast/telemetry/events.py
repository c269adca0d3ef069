"""Everything that Holdfast reports, by name: one table says the level and the sentence of each event.

`emit` writes one log record (one JSON object a line, or text for people) and counts it, so that what is logged is also
counted. A payload, a token or a password is never a field.
"""

from __future__ import annotations

import logging
from collections import Counter
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

logger = logging.getLogger("holdfast")


class Event(NamedTuple):
    """How an event is told."""

    level: int
    sentence: str


EVENTS: dict[str, Event] = {
    "server.started": Event(logging.INFO, "serving on {address}"),
    "server.stopping": Event(logging.INFO, "stopping"),
    "server.stopped": Event(logging.INFO, "stopped"),
    "server.bug": Event(logging.ERROR, "{method} failed with {error}"),
    "server.crowded": Event(logging.WARNING, "{count} idle connections were ended to make room; {most} is the maximum"),
    "server.slow": Event(logging.DEBUG, "a client was too slow with {what}"),
    "server.wrong_token": Event(
        logging.WARNING, "{tries} wrong tokens came from {address}, its answers are slowed down"
    ),
    "server.open_door": Event(logging.WARNING, "{warning}"),
    "queue.loaded": Event(logging.DEBUG, "queue '{queue}' is loaded from storage '{storage}'"),
    "queue.created": Event(logging.INFO, "queue '{queue}' was created"),
    "queue.spread": Event(
        logging.WARNING, "queue '{queue}' is spread over several storages; dedupe_key and source_id hold within each"
    ),
    "queue.updated": Event(logging.INFO, "queue '{queue}' was updated"),
    "queue.deleted": Event(logging.INFO, "queue '{queue}' was deleted with {count} items"),
    "queue.cleared": Event(logging.INFO, "queue '{queue}' was cleared of {count} items"),
    "queue.deletions_wait": Event(
        logging.WARNING,
        "nothing was written for more than 6 h, and up to {count} items of queue '{queue}' are past their time by this "
        "clock; none is deleted for {delay}: is the clock right? --accept-clock does not wait",
    ),
    "queue.storage_failed": Event(
        logging.ERROR, "storage '{storage}' of queue '{queue}' failed and is set aside; {error}"
    ),
    "catalog.failed": Event(logging.ERROR, "the catalog or its hints cannot be read; {error}"),
    "queue.bug": Event(logging.ERROR, "queue '{queue}' met a bug; {error}"),
    "item.dead": Event(logging.INFO, "{count} items of queue '{queue}' died and go to '{dead_queue}'"),
    "item.redriven": Event(logging.INFO, "{count} items of '{queue}' go back to '{source_queue}'"),
    "item.deleted": Event(logging.WARNING, "item '{item}' exceeded max_attempts, deleting (no dead_queue configured)"),
    "item.expired": Event(logging.WARNING, "item '{item}' expired, deleting (no dead_queue configured)"),
    "item.rejected": Event(logging.WARNING, "item '{item}' was rejected, deleting (no dead_queue configured)"),
    "item.retention": Event(logging.WARNING, "item '{item}' is past the dead_retention of '{queue}', deleting"),
    "consumer.waits": Event(logging.WARNING, "a consumer of queue '{queue}' waits; {error}"),
    "consumer.started": Event(logging.INFO, "consuming from '{queue}'"),
    "consumer.stopped": Event(logging.INFO, "no longer consuming from '{queue}'"),
    "consumer.unchecked": Event(logging.WARNING, "of queue '{queue}' it could not be checked; {error}"),
    "process.killed": Event(logging.ERROR, "process {pid} was ended by signal {signal}, another is started"),
    "message.done": Event(logging.DEBUG, "a message of '{queue}' is done"),
    "message.failed": Event(
        logging.WARNING, "attempt {attempt} of {attempts_max} at a message of '{queue}' failed; {error}"
    ),
    "message.retried": Event(logging.INFO, "a message of '{queue}' is tried again after {delay}"),
    "message.parked": Event(logging.ERROR, "a message of '{queue}' was parked; {reason}: {error}"),
    "message.poison": Event(
        logging.ERROR, "a message of '{queue}' was being worked on when a process ended, for the {attempt}. time"
    ),
    "message.given_back": Event(logging.INFO, "a message of '{queue}' was given back; {error}"),
    "message.not_ours": Event(logging.WARNING, "a message of '{queue}' is no longer ours and comes again; {error}"),
    "message.unsettled": Event(
        logging.ERROR, "a message of '{queue}' cannot be settled, it is held and tried again; {error}"
    ),
    "message.overdue": Event(logging.WARNING, "a handler of '{queue}' is past its time limit and still runs; {error}"),
    "message.repeated": Event(logging.INFO, "a message of '{queue}' was handled before, nothing was done"),
    "message.bug": Event(logging.ERROR, "the consumer of '{queue}' met a bug; {error}"),
    "dead.failed": Event(logging.ERROR, "failed to produce to dead_queue '{dead_queue}': {error}"),
    "dead.revived": Event(
        logging.WARNING,
        "dead_queue '{dead_queue}' of {count} dying items is gone; they went back to '{queue}'",
    ),
    "collect.starting": Event(logging.INFO, "Service starting - checking for recoverable transactions"),
    "collect.found": Event(logging.INFO, "Found {count} transactions to recover"),
    "collect.recovering": Event(logging.INFO, "Recovering transaction {transaction}"),
    "collect.recovered": Event(logging.INFO, "Recovered transaction {transaction} in state {state}"),
    "collect.ready": Event(logging.INFO, "Recovery complete - service ready for new requests"),
    "collect.started": Event(logging.INFO, "transaction {transaction} was started"),
    "collect.moved": Event(logging.INFO, "transaction {transaction} is {state}; {reason}"),
    "collect.uploaded": Event(logging.DEBUG, "Uploaded ordinal {ordinal} to {path}"),
    "collect.skipped": Event(logging.INFO, "Ordinal {ordinal} already processed - skipping upload"),
    "collect.parked": Event(logging.WARNING, "a message of transaction {transaction} was parked; {reason}"),
    "collect.missing": Event(logging.INFO, "transaction {transaction} asked its producer for {count} missing ranges"),
    "collect.waits": Event(logging.WARNING, "transaction {transaction} waits and tries again; {error}"),
    "collect.lost": Event(logging.WARNING, "transaction {transaction} is no longer ours; {error}"),
    "collect.bug": Event(logging.ERROR, "transaction {transaction} met a bug; {error}"),
    "collect.troubled": Event(logging.ERROR, "the collector cannot look after its transactions; {error}"),
    "recovery.unlocked": Event(logging.WARNING, "no lock could be taken for the recovery of '{queue}'; {error}"),
    "recovery.interrupted": Event(logging.WARNING, "the recovery of '{queue}' was interrupted, trying again; {error}"),
    "recovery.resumed": Event(logging.INFO, "the recovery of '{queue}' goes on"),
    "recovery.waits": Event(logging.WARNING, "the recovery of '{queue}' waits; {error}"),
    "recovery.no_journal": Event(logging.WARNING, "the journal '{queue}' cannot be written, going on without; {error}"),
    "recovery.started": Event(logging.INFO, "a recovery of '{queue}' takes {found} letters"),
    "recovery.progress": Event(logging.INFO, "recovered {recovered} letters of '{queue}' so far"),
    "recovery.kept": Event(logging.WARNING, "{count} letters of '{queue}' are kept; {error}"),
    "recovery.ended": Event(logging.INFO, "a recovery of '{queue}' ended; {recovered} recovered, {kept} kept"),
    "recovery.unrecorded": Event(logging.WARNING, "a recovery of '{queue}' is not in the ledger; {error}"),
    "recovery.failed": Event(logging.ERROR, "a recovery of '{queue}' failed; {error}"),
    "fingerprint.failed": Event(
        logging.WARNING, "the fingerprint function {function} failed, the built-in one is used; {error}"
    ),
    "capture.failed": Event(logging.WARNING, "the capture of '{queue}' waits and tries again; {error}"),
    "capture.resumed": Event(logging.INFO, "the capture of '{queue}' runs"),
    "ledger.upgrading": Event(
        logging.INFO, "what an older program left in the vault is sealed; that takes a while once"
    ),
    "ledger.key_beside": Event(
        logging.WARNING,
        "the key of the ledger, '{file}', lies beside the vault: whoever can change the one can forge the other; where "
        "that matters keep it elsewhere, with ledger_key_file or HOLDFAST_LEDGER_KEY",
    ),
    "vault.deletions_wait": Event(
        logging.WARNING,
        "nothing was written for more than 6 h: {count} letters are past their retention by this clock, and none is "
        "deleted before {until}; is the clock right? --accept-clock does not wait",
    ),
    "vault.failed": Event(logging.WARNING, "the vault cannot be looked after, trying again; {error}"),
    "dead_queues.unknown": Event(logging.WARNING, "dead-letter queues of a broker are not known now; {error}"),
    "redrive.waits": Event(logging.WARNING, "redrive {redrive} waits and tries again; {error}"),
    "redrive.ended": Event(logging.INFO, "redrive {redrive} is {state}; {redriven} redriven, {failed} failed"),
    "broker.awaited": Event(
        logging.WARNING,
        "{address} is not there; what needs it waits (captures, redrives, dead-letter queues), everything else is "
        "served: {error}",
    ),
    "broker.lost": Event(logging.WARNING, "no connection to {address}, trying again; {error}"),
    "broker.found": Event(logging.INFO, "connected to {address} again"),
    "broker.blocked": Event(logging.WARNING, "{address} takes no publishes; {error}"),
    "broker.unblocked": Event(logging.INFO, "{address} takes publishes again"),
    "broker.consumer_lost": Event(logging.WARNING, "consuming from '{queue}' was interrupted, trying again; {error}"),
    "broker.consumer_resumed": Event(logging.INFO, "consuming from '{queue}' again"),
}
#: How often each event happened, by queue. The number of queues bounds it.
counts: Counter[tuple[str, str]] = Counter()


def emit(name: str, *, traceback: BaseException | None = None, count: int = 1, **fields: object) -> None:
    """Log and count an event of the table above."""
    event = EVENTS[name]
    queue = fields.get("queue", "")
    counts[name, str(queue)] += count
    if logger.isEnabledFor(event.level):
        fields["count"] = count
        logger.log(
            event.level,
            event.sentence.format_map(fields),
            extra={"event": name, "fields": fields},
            exc_info=traceback,
        )


def set_up_logging(*, level: str, form: str) -> None:
    """Our events from `level` on, everybody else's warnings, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logger.setLevel(level.upper())
    logger.handlers, logger.propagate = [], True  # what a command has set up is over


class JsonFormatter(logging.Formatter):
    """`at`, `level`, `event`, `message`, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", record.name),
            "message": record.getMessage(),
            **{name: value for name, value in fields.items() if name not in {"at", "level", "event", "message"}},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()
