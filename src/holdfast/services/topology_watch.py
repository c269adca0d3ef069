"""The topology of a server's broker, for those who look: exchanges, queues and bindings as they stand there, how deep
each queue is, and what in it is known to lose messages.

The broker is asked in the background, at most once in a few seconds and only while somebody looks; one that is away is
said to be, and holds nobody up. A topology file of the settings is shown where the broker is not, and compared with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.moments import moment
from holdfast.core.requests.declare import view
from holdfast.core.requests.recover import DepthView, ReadTopology, TopologyReply
from holdfast.core.topology.diff import diff
from holdfast.core.topology.layouts import FILE_BYTES_MAX, design, parse_file
from holdfast.core.topology.model import Design, Topology, Version
from holdfast.core.topology.routing import roles_of
from holdfast.core.topology.rules import hazards
from holdfast.errors import HoldfastError, Invalid
from holdfast.ports.clock import Clock
from holdfast.ports.topology import LiveTopology, TopologyBroker
from holdfast.telemetry.events import emit

#: What the broker said is so long good enough, and of a large one so many times as long as it took to judge it.
FRESH_S = 5.0
FRESH_TIMES = 20.0
#: So long a question is waited for by those who look,
PATIENCE_S = 1.0
#: and after so long it is given up.
ASK_TIMEOUT_S = 20.0
#: What a file is designed for where no broker says its version.
VERSION_DEFAULT = Version(3, 10)
FINDINGS_COUNT_MAX = 500

OpenBroker = Callable[[], AbstractAsyncContextManager[TopologyBroker]]


class TopologyWatch:
    """The topology of one virtual host, as it was seen last."""

    def __init__(
        self, open_broker: OpenBroker | None, *, without: str, file: Path | None, patterns: list[str], clock: Clock
    ) -> None:
        """`without` is why there is no broker to ask: no_broker or no_management; `patterns` are of dead queues."""
        self._open_broker = open_broker
        self._without = without
        self._file = file
        self._patterns = patterns
        self._clock = clock
        self._seen: TopologyReply | None = None
        self._why = ""
        self._asking: asyncio.Task[None] | None = None
        self._stale_s = 0.0

    async def read(self, request: ReadTopology) -> TopologyReply:
        """What is known now, within a moment."""
        if self._open_broker is not None:
            await self._look()
        seen = self._seen
        if self._open_broker is not None and seen is not None and not self._why:
            found = seen
        else:
            known = seen if seen is not None else await asyncio.to_thread(self._of_file)
            found = replace(known, state=self._without or ("unreachable" if self._why else "asking"), why=self._why)
        return _narrowed(found, request.like) if request.like else found

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            with suppress(asyncio.CancelledError):
                await self._asking

    # Inside.

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if self._asking is None and loop.time() >= self._stale_s:
            self._asking = asyncio.create_task(self._ask(), name="topology of the broker")
        if self._asking is not None and (self._seen is None or self._why):
            await asyncio.wait([self._asking], timeout=PATIENCE_S)

    async def _ask(self) -> None:
        assert self._open_broker is not None  # noqa: S101  or nobody is asked
        loop, looked_s = asyncio.get_running_loop(), 0.0
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S), self._open_broker() as broker:
                live = await broker.read()
            began_s = loop.time()
            self._seen = await asyncio.to_thread(self._of_broker, live)
            looked_s = loop.time() - began_s
            self._why = ""
        except TimeoutError:
            self._why = f"broker is silent; it has not answered for {ASK_TIMEOUT_S:.0f} s"
        except HoldfastError as error:
            self._why = error.message
        except Exception as bug:  # noqa: BLE001 - those who look are told that nothing is known
            emit("server.bug", method="topology", error=repr(bug), traceback=bug)
            self._why = "broker could not be asked; the server's log has the details"
        finally:
            self._asking = None
            self._stale_s = loop.time() + max(FRESH_S, FRESH_TIMES * looked_s)

    def _of_broker(self, live: LiveTopology) -> TopologyReply:
        names = {one.name: None for one in live.effective.queues}
        file = self._read_file(live.version)
        told = file.wanted.dead_queues
        dead = [name for name in names if name in told or any(fnmatchcase(name, one) for one in self._patterns)]
        families = [one for one in file.wanted.families if one.queue in names]
        seen = Design(
            topology=live.effective, families=tuple(families), version=live.version, dead_queues=frozenset(dead)
        )
        unlike = [str(one) for one in diff(file.wanted.topology, live.effective, owns=file.wanted.owns)]
        return TopologyReply(
            state="broker",
            vhost=live.vhost,
            version=str(live.version),
            read_at=moment(self._clock.now_us()),
            topology=live.effective,
            families=families,
            dead_queues=dead,
            roles=roles_of(seen),
            depths={
                name: view(DepthView, state, messages=state.messages_count, consumers=state.consumers_count)
                for name, state in live.states.items()
            },
            hazards=hazards(seen)[:FINDINGS_COUNT_MAX],
            has_file=self._file is not None,
            file_trouble=file.trouble,
            differences=unlike[:FINDINGS_COUNT_MAX] if self._file and not file.trouble else [],
        )

    def _of_file(self) -> TopologyReply:
        file = self._read_file(VERSION_DEFAULT)
        return TopologyReply(
            state="asking",
            version=str(VERSION_DEFAULT) if self._file else "",
            is_file=self._file is not None and not file.trouble,
            topology=file.wanted.topology,
            families=list(file.wanted.families),
            dead_queues=sorted(file.wanted.dead_queues),
            roles=roles_of(file.wanted),
            hazards=hazards(file.wanted)[:FINDINGS_COUNT_MAX],
            has_file=self._file is not None,
            file_trouble=file.trouble,
        )

    def _read_file(self, version: Version) -> _FileDesign:
        nothing = Design(topology=Topology())
        if self._file is None:
            return _FileDesign(nothing, "")
        try:
            with self._file.open("rb") as stream:
                data = stream.read(FILE_BYTES_MAX + 1)
            return _FileDesign(design(parse_file(data, source=self._file.name), version), "")
        except OSError as error:
            return _FileDesign(nothing, f"topology file cannot be read; {self._file.name}: {error.strerror or error}")
        except Invalid as error:
            return _FileDesign(nothing, error.message)


class _FileDesign(Struct, frozen=True):
    """What the file of the settings asks for, or why it cannot be said."""

    wanted: Design
    trouble: str


def _narrowed(found: TopologyReply, like: str) -> TopologyReply:
    """The queues and exchanges with this in their names, what is bound to them, and where their dead letters go."""
    whole = found.topology
    words = like.lower()
    everything = [*(one.name for one in whole.queues), *(one.name for one in whole.exchanges)]
    names = {name for name in everything if words in name.lower()}
    near = {one.dead_exchange for one in whole.queues if one.name in names and one.dead_exchange}
    for one in whole.bindings:
        if one.source in names | near or one.destination in names:
            near |= {one.source, one.destination}
    shown = names | near
    part = Topology(
        exchanges=tuple(one for one in whole.exchanges if one.name in shown),
        queues=tuple(one for one in whole.queues if one.name in shown),
        bindings=tuple(one for one in whole.bindings if {one.source, one.destination} <= shown),
    )
    return replace(
        found,
        topology=part,
        families=[one for one in found.families if one.queue in shown],
        dead_queues=[name for name in found.dead_queues if name in shown],
        roles={name: role for name, role in found.roles.items() if name in shown},
        depths={name: depth for name, depth in found.depths.items() if name in shown},
        hazards=[one for one in found.hazards if one.name in shown],
        differences=[text for text in found.differences if any(f"'{name}'" in text for name in shown)],
    )
