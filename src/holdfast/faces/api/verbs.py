"""`POST /v1/<noun>.<verb>`: served straight from its connection, because this is the hot path.

It checks the token as soon as the head is there, turns JSON into a request, calls the service and turns the reply or
the error into JSON. It decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple, cast

import msgspec

from holdfast.core.requests.declare import EMPTY_BODY, Caller, Role
from holdfast.core.requests.queue import VERBS, ErrorReply, LeaseReply, LeaseRequest, ProduceRequest, QueueRequest
from holdfast.errors import (
    BadBody,
    BadDeadQueue,
    BadMethod,
    HoldfastError,
    InternalError,
    Invalid,
    Unauthorized,
    UnknownMethod,
)
from holdfast.faces.api.authenticator import Authenticator
from holdfast.services.queue.service import QueueService
from holdfast.telemetry.events import emit
from holdfast.telemetry.prometheus import Requests

Scope = MutableMapping[str, Any]

#: Who sends a body for longer is asked for his token again: it may have ended meanwhile.
SLOW_BODY_S = 1.0
NO_HEADERS: dict[str, str] = {}

_encode = msgspec.json.Encoder().encode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])  # raw: a number that is too large is JSON all the same


class VerbCall(NamedTuple):
    """A call of a verb whose head has come, and who makes it; without a caller it is refused, whatever its body is."""

    verb: str
    scope: Scope
    caller: Caller | None
    error: HoldfastError | None
    body_bytes_max: int
    started_s: float

    @property
    def method(self) -> str:
        """Of HTTP."""
        return str(self.scope["method"])

    @property
    def reads(self) -> bool:
        """Whether it changes nothing, and can be asked again."""
        return self.verb.endswith((".list", ".info", ".stats"))

    @property
    def waits(self) -> bool:
        """Whether it ends when its caller goes away."""
        return self.verb == "queue.lease"


class Verbs:
    """The verbs of the queue service over HTTP."""

    def __init__(
        self,
        service: QueueService,
        *,
        authenticator: Authenticator,
        body_bytes_max: Mapping[str, int],
        requests: Requests,
    ) -> None:
        self._service = service
        self._authenticator = authenticator
        self._requests = requests
        self._decoders = {name: verb.decoder for name, verb in VERBS.items()}
        self._roles = {name: verb.needs(authenticator.redrive_role) for name, verb in VERBS.items()}
        self._limits = {name: body_bytes_max[verb.limit] for name, verb in VERBS.items()}
        self._default_limit = body_bytes_max["other"]

    def knows(self, scope: Scope) -> bool:
        """Whether a request, of whatever kind, shows who makes it; many pages are for strangers as well."""
        return self._authenticator.knows(scope)

    def begin(self, verb: str, scope: Scope) -> VerbCall:
        """Whether this caller may call it, before its body is there."""
        started_s, caller, refused = time.perf_counter(), None, None
        try:
            # What nobody has declared takes an admin.
            caller = self._authenticator.check(scope, self._roles.get(verb, Role.ADMIN))
        except HoldfastError as error:
            refused = error.with_traceback(None)  # with its frames it would hold the body, and be held by it
        limit = self._limits.get(verb, self._default_limit)
        return VerbCall(verb, scope, caller, refused, limit, started_s)

    async def answer(self, call: VerbCall, body: bytes | bytearray, size: int) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and further headers of the answer. `size` is how large the body was, however much is there."""
        try:
            code, reply, headers = 200, _encode(await self._reply(call, body, size)), NO_HEADERS
        except HoldfastError as error:
            await self._authenticator.slow_down(call.scope, error)
            code, reply, headers = error.code, error_body(error), error_headers(error)
            error.__traceback__ = None
        except asyncio.CancelledError:
            self._count(call, 499)  # a lease of which nobody would hear: it was not made
            raise
        self._count(call, code)
        return code, reply, headers

    def _count(self, call: VerbCall, code: int) -> None:
        known = call.verb if call.verb in VERBS else "unknown"
        self._requests.count(known, code, time.perf_counter() - call.started_s)

    async def _reply(self, call: VerbCall, body: bytes | bytearray, size: int) -> Any:
        caller = call.caller
        if caller is None:
            raise call.error or InternalError("internal error; a caller is missing")
        if size > call.body_bytes_max:
            raise Invalid(f"body is too large; {size} bytes were sent, {call.body_bytes_max} is the maximum")
        if (decoder := self._decoders.get(call.verb)) is None:
            raise UnknownMethod(f"method is unknown; there is no '{call.verb}'")
        if call.method != "POST":
            raise BadMethod(call.method, ["POST"])
        request = _decode(decoder, body)
        if time.perf_counter() - call.started_s > SLOW_BODY_S:
            self._authenticator.caller(call.scope)
        request.declared.check_queues(request, caller)
        try:
            if not isinstance(request, LeaseRequest | ProduceRequest):
                reply: Any = await self._service.call(request, caller)
                if call.reads:
                    self._authenticator.caller(call.scope)  # it may have waited for its turn
                return reply
            with self._authenticator.while_let_in(call.scope, caller):  # these wait
                reply = await self._service.call(cast(QueueRequest[Any], request))
            if isinstance(reply, LeaseReply):
                self._check_again(call, reply)
            return reply
        except BadDeadQueue as error:
            raise error if caller.may_touch(error.source_queue) else Invalid(error.unnamed) from None
        except HoldfastError:
            raise
        except Exception as error:
            emit("server.bug", method=call.verb, error=repr(error), traceback=error)
            raise InternalError("internal error; the server's log has the details") from error

    def _check_again(self, call: VerbCall, reply: LeaseReply) -> None:
        """Before items are handed out. Raises Unauthorized, and they are free again."""
        try:
            self._authenticator.caller(call.scope)
        except HoldfastError:
            self._service.manager.get(reply.queue_name).release(reply.partition, [item.id for item in reply.items])
            raise


def _decode(decoder: msgspec.json.Decoder[QueueRequest[Any]], body: bytes | bytearray) -> QueueRequest[Any]:
    if not body:
        raise BadBody(EMPTY_BODY)
    try:
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise BadBody("body is invalid; it is not UTF-8") from error
    except msgspec.ValidationError as error:
        # The typed decoder stops at the first wrong type; whether the whole is JSON is a question of its own.
        _check_object(body)
        raise Invalid(f"request is invalid; {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadBody(f"body is invalid; {error}") from error


def _check_object(body: bytes | bytearray) -> None:
    """The body is UTF-8, JSON, and an object; raises BadBody."""
    try:
        body.decode()
        _object.decode(body)
    except msgspec.ValidationError as error:
        raise BadBody("body is invalid; a JSON object is expected") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadBody(f"body is invalid; {error}") from error


def error_body(error: HoldfastError) -> bytes:
    """An error as JSON."""
    details = {"ids": list(error.ids)} if error.ids else {}
    return _encode(ErrorReply(code=error.code, code_text=error.code_text, message=error.message, details=details))


def error_headers(error: HoldfastError) -> dict[str, str]:
    """What HTTP wants to be said beside an error."""
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {"allow": error.allowed} if isinstance(error, BadMethod) else {}
