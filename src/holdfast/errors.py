"""Every error that Holdfast raises on purpose, in one tree.

HoldfastError               500
├── Invalid                 400  the request cannot be carried out as it stands
│   ├── QueueMissing             no such queue, or it was deleted or made anew
│   ├── BadDeadQueue             it is another queue's dead queue
│   ├── BadIds                   ids that do not exist or are not leased
│   ├── NotFound            404  no such path, letter, plan, redrive or dead-letter queue
│   ├── BadMethod           405  another HTTP method is meant here
│   ├── Conflict            409  what the caller saw is no longer so; nothing was done
│   ├── BlobExists               something else is stored under this path
│   └── BlobMissing              nothing is stored under this path
├── Unauthorized            401
├── Forbidden               403
├── ShuttingDown            453  this server is stopping; another one may serve
├── TryAgain                454  nothing changed; the same request may succeed later
│   ├── NothingToLease           the long poll ran out
│   └── StorageFailed            the store refused; nothing was acknowledged
│       └── Unstorable           and will always refuse this: it is too large, or has no form there
├── BadBody                 455  not UTF-8 JSON, or not an object
├── InternalError           500  a bug of ours
├── UnknownMethod           501
├── Unreachable             454  a client could not reach its server
├── NotOurs                      a message that is no longer ours to settle: it comes again
├── LeaseLost                    a transaction that is no longer ours: nothing was written
├── MessageRefused               a message that will never be taken as it is; it was not stored
├── PublishFailed           502  a publish of a program that was not confirmed
│   ├── NotStored                no queue has it, for certain
│   └── OutcomeUnknown           it may be stored or not
├── CannotStart             400  settings, folder lock, schema version: said at start-up
│   └── BadUrl                   a URL that names no storage, vault or place for blobs, wherever it is tried
├── BrokerError             502  RabbitMQ said no, could not be reached, or is no RabbitMQ
│   ├── BadAddress          400  the address cannot be used as it stands
│   ├── BrokerUnreachable   454  also an Unreachable: nothing was sent
│   │   └── BrokerLost           the connection ended; what was in flight is unknown
│   ├── NotABroker               something answered, but not AMQP 0-9-1
│   ├── TlsRefused               a certificate was not accepted
│   ├── BrokerRefused            login, virtual host, permission, a missing queue or exchange
│   ├── ConsumerLost             consuming ended and could not be taken up again
│   └── RecoveryLocked      409  another recovery of the same queue is running
└── RecoveryRefused         400  a recovery that could not be safe: nothing was taken

A text is `constant part; details`, so that a program can match the part before the semicolon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class HoldfastError(Exception):
    """Something went wrong."""

    code = 500
    code_text = "Internal Error"

    def __init__(self, message: str, *, ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.ids = tuple(ids)


class Invalid(HoldfastError):
    """The request cannot be carried out as it stands; nothing changed."""

    code = 400
    code_text = "Bad Request"


class QueueMissing(Invalid):
    """No such queue, or it was deleted or made anew; nothing changed."""

    def __init__(self, queue_name: str) -> None:
        super().__init__(f"queue does not exist; no such queue named '{queue_name}'")
        self.queue_name = queue_name


class BadDeadQueue(Invalid):
    """It is another queue's dead queue; nothing changed. Not everybody may hear of that other one."""

    def __init__(self, text: str, source_queue: str, then: str = "") -> None:
        super().__init__(f"{text} '{source_queue}'{then}")
        self.source_queue = source_queue
        self.unnamed = f"{text} a queue that this token is not for{then}"


class BadIds(Invalid):
    """Some ids of the request do not exist or are not leased; none of the request was carried out."""


class NotFound(Invalid):
    """No such thing in the vault, or no queue that we know; nothing changed."""

    code = 404
    code_text = "Not Found"


class BadMethod(Invalid):
    """Another HTTP method is meant here; nothing changed."""

    code = 405
    code_text = "Method Not Allowed"

    def __init__(self, method: str, allowed: Sequence[str]) -> None:
        self.allowed = ", ".join(sorted(allowed))
        super().__init__(f"method is invalid; use {self.allowed}, not {method}")


class Conflict(Invalid):
    """What the caller saw is no longer so, or this cannot be done to it now; nothing was done."""

    code = 409
    code_text = "Conflict"


class BlobExists(Invalid):
    """Something else is stored under this path; it was not touched."""


class BlobMissing(Invalid):
    """Nothing is stored under this path."""


class Unauthorized(HoldfastError):
    """No valid token came with the request."""

    code = 401
    code_text = "Unauthorized"

    def __init__(self) -> None:
        super().__init__("unauthorized; a valid token is required")


class Forbidden(HoldfastError):
    """The caller is known, or not trusted at all, and may not do this."""

    code = 403
    code_text = "Forbidden"


class ShuttingDown(HoldfastError):
    """The server is stopping; the request was not carried out."""

    code = 453
    code_text = "Request Failed"

    def __init__(self) -> None:
        super().__init__("queue is shutting down; try another server")


class TryAgain(HoldfastError):
    """Nothing was acknowledged; the same request may succeed later."""

    code = 454
    code_text = "Retry Request"


class NothingToLease(TryAgain):
    """The long poll ran out; no item was leased."""

    def __init__(self) -> None:
        super().__init__("request timeout; no items are in the queue, try again")


class StorageFailed(TryAgain):
    """The store refused; nothing of the batch is acknowledged."""


class Unstorable(StorageFailed):
    """The store will never take something of the batch, whatever its health; nothing of it is acknowledged."""


class BadBody(HoldfastError):
    """The body is not a UTF-8 JSON object."""

    code = 455
    code_text = "Client Content Error"


class InternalError(HoldfastError):
    """A bug of ours; the log has the details."""


class UnknownMethod(HoldfastError):
    """There is no such verb."""

    code = 501
    code_text = "Not Implemented"


class Unreachable(HoldfastError):
    """The server could not be reached, or its answer was lost: the outcome is unknown."""

    code = 454
    code_text = "Retry Request"
    is_unsent = False  #: whether it is certain that nothing was sent


class NotOurs(HoldfastError):
    """The message is the broker's again (its lease ran out, its channel ended): it comes a second time."""


class LeaseLost(HoldfastError):
    """The transaction has another owner, another state, or is gone: nothing was written, and we have to let go."""


class MessageRefused(HoldfastError):
    """The other side will never take this message as it is (too large, unreadable); it was not stored."""


class PublishFailed(HoldfastError):
    """A publish was not confirmed. `ids` are those of the messages, `sent_count` is how often one was sent; of many,
    `errors` has each error by its place in what was given, and everything else is stored."""

    code = 502
    code_text = "Publish Failed"

    def __init__(
        self,
        message: str,
        *,
        ids: Sequence[str],
        sent_count: int = 0,
        errors: Mapping[int, PublishFailed] | None = None,
    ) -> None:
        super().__init__(message, ids=ids)
        self.sent_count = sent_count
        self.errors = dict(errors or {})


class NotStored(PublishFailed):
    """No queue has what was published, for certain: publishing it again makes no second one."""


class OutcomeUnknown(PublishFailed):
    """What was published may be stored or not. Publish it again with the same id, so that a second one can be told."""


class CannotStart(HoldfastError):
    """Said at start-up: what is wrong, and what to do."""

    code = 400
    code_text = "Cannot Start"


class BadUrl(CannotStart):
    """A URL that names nothing that there is: who gave it has to give another one."""


# RabbitMQ. No text of these ever holds a password.


class BrokerError(HoldfastError):
    """RabbitMQ said no, could not be reached, or is no RabbitMQ."""

    code = 502
    code_text = "Broker Error"


class BadAddress(BrokerError):
    """The amqp:// or amqps:// address cannot be used as it stands."""

    code = 400
    code_text = "Bad Request"


class BrokerUnreachable(Unreachable, BrokerError):
    """None of the broker's addresses could be connected to; nothing was sent."""


class BrokerLost(BrokerUnreachable):
    """The connection ended; the outcome of whatever was in flight on it is unknown."""


class NotABroker(BrokerError):
    """Something answered, but not AMQP 0-9-1: another protocol, another version, TLS without or instead of plain."""


class TlsRefused(BrokerError):
    """No TLS connection came about: a certificate was not accepted, by us or by the broker."""


class BrokerRefused(BrokerError):
    """The broker does not let us do this: login, virtual host, permission, a missing queue or exchange."""

    code_text = "Broker Refused"

    def __init__(self, message: str, *, reply_code: int = 0) -> None:
        super().__init__(message)
        self.reply_code = reply_code


class ConsumerLost(BrokerError):
    """Consuming ended and could not be taken up again; unsettled messages are the broker's again."""


class RecoveryLocked(BrokerError):
    """Another recovery of the same dead-letter queue is running."""

    code = 409
    code_text = "Conflict"


class RecoveryRefused(HoldfastError):
    """A recovery that could not be safe: nothing was taken."""

    code = 400
    code_text = "Bad Request"
