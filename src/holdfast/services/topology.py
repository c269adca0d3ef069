"""Brings a broker to what a topology file says, and proves that it is there: plan, apply, check, export, import.

Nothing is deleted unless asked for, and then only what is empty. Additions go in an order in which every queue has its
way out before anything can arrive in it; the first failure ends them, so that no queue is left without its net.
The probes that prove a design go through every wait queue, into every dead queue, and by way of a rejection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
from msgspec import Struct

from holdfast.core.topology.definitions import Definitions, to_definitions
from holdfast.core.topology.diff import Difference, DifferenceKind, diff
from holdfast.core.topology.layouts import TopologyFile, design
from holdfast.core.topology.model import (
    BROKERS_EXCHANGES,
    POLICY_KEYS,
    Binding,
    Design,
    Exchange,
    Family,
    FamilyQueue,
    Policy,
    Queue,
    Topology,
    Version,
    in_force,
)
from holdfast.core.topology.routing import Graph, cut_off, without
from holdfast.core.topology.rules import Hazard, hazards, refuse
from holdfast.errors import BrokerError, Invalid
from holdfast.ports.topology import LiveTopology, Probe, ProbeResult, TopologyBroker

GROUPS_AT_ONCE_MAX = 4


class TopologyPlan(Struct, frozen=True, kw_only=True):
    """What stands between the file and the broker."""

    vhost: str
    version: Version
    differences: tuple[Difference, ...] = ()
    #: What the chosen queue types cannot promise; nothing in it is wrong.
    remarks: tuple[Hazard, ...] = ()
    probes: tuple[ProbeResult, ...] = ()
    left_out: tuple[str, ...] = ()  #: of a definitions file: sections, or virtual hosts, that were not read

    @property
    def is_clean(self) -> bool:
        """The broker is as the file says, nothing in that loses messages, and no probe was lost."""
        return not (self.differences or _lost(self.probes) or any(hazard.fatal for hazard in self.remarks))


class Applied(Struct, kw_only=True):
    """What was done, what was not, and what the probes say. It is filled in while that is being done."""

    vhost: str
    version: Version
    created: list[str] = []
    deleted: list[str] = []
    kept: dict[str, str] = {}  #: what was not deleted, and why
    remaining: tuple[Difference, ...] = ()
    probes: tuple[ProbeResult, ...] = ()
    failure: str = ""

    @property
    def is_done(self) -> bool:
        """Everything that was asked for is there; what is superfluous stays without harm unless it was to go."""
        return not (_to_be_made(self.remaining) or self.kept or self.failure or _lost(self.probes))

    @property
    def has_changed(self) -> bool:
        """Something on the broker is not what it was."""
        return bool(self.created or self.deleted)


class ImportReport(Struct, frozen=True, kw_only=True):
    """An import, read back."""

    vhost: str
    version: Version
    created: tuple[str, ...] = ()
    remaining: tuple[Difference, ...] = ()
    left_out: tuple[str, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    failure: str = ""


class Topologies:
    """The topology of one virtual host."""

    def __init__(self, broker: TopologyBroker) -> None:
        self._broker = broker

    @property
    def vhost(self) -> str:
        """The virtual host."""
        return self._broker.vhost

    async def check(self, file: TopologyFile | Definitions, *, probe: bool = False) -> TopologyPlan:
        """Whether the broker is as the file says, or what would change; with `probe`, whether messages get through as
        well. Raises Invalid for an unsafe topology file, BrokerError without the management API."""
        live = await self._broker.read()
        if isinstance(file, Definitions):
            _check_ends(file.topology, live.declared)
            return TopologyPlan(
                vhost=live.vhost,
                version=live.version,
                differences=tuple(_to_be_made(diff(file.topology, live.declared))),
                remarks=tuple(_made_by(file.topology, live)),
                left_out=file.left_out,
            )
        wanted = design(file, live.version)
        differences = _differences(wanted, live)
        probes: tuple[ProbeResult, ...] = ()
        if probe and not _missing(differences):
            probes = await _send_probes(self._broker, wanted, live, anyway=True)
        return TopologyPlan(
            vhost=live.vhost,
            version=live.version,
            differences=differences,
            remarks=tuple(hazards(wanted)),
            probes=probes,
        )

    async def apply(self, file: TopologyFile, *, delete: bool = False, probe: bool | None = None) -> Applied:
        """Bring the broker to the file. `probe`: True for every queue, None for new and idle ones, False for none.

        Raises Invalid or BrokerError with nothing changed; what goes wrong later is in the answer.
        """
        live = await self._broker.read()
        wanted = design(file, live.version)
        done = Applied(vhost=live.vhost, version=live.version)
        if delete:
            await self._delete(wanted, live, done)
            live = await self._broker.read() if done.deleted else live
        before = {queue.name for queue in live.declared.queues}
        await self._create(_differences(wanted, live), done)
        after = await self._broker.read() if done.created else live
        done.remaining = _differences(wanted, after)
        if probe is not False and not done.failure and not _missing(done.remaining):
            new = frozenset(queue.name for queue in wanted.topology.queues if queue.name not in before)
            done.probes = await _send_probes(self._broker, wanted, after, new=new, anyway=probe is True)
        return done

    async def export(self) -> dict[str, object]:
        """The virtual host as `definitions.json` has it; users and permissions are not in it."""
        live = await self._broker.read()
        return {"rabbit_version": str(live.version), **to_definitions(live.declared, vhost=live.vhost)}

    async def import_definitions(self, given: Definitions, *, accept_hazards: bool = False) -> ImportReport:
        """Import and read back. Raises Invalid (nothing changed) for what is unsafe, unless that is accepted, and
        BrokerError with nothing changed; what was made before a refusal is in the answer."""
        live = await self._broker.read()
        wanted = given.topology
        fatal = [hazard for hazard in _made_by(wanted, live) if hazard.fatal]
        if not accept_hazards:
            refuse(fatal, "definitions are")
        _check_ends(wanted, live.declared)
        unlike = _to_be_made(diff(wanted, live.declared))
        missing, failed = _missing(unlike), None
        if missing or any(each.what == "policy" for each in unlike):
            try:
                await self._broker.import_topology(wanted)
            except BrokerError as error:
                failed = error
        after = await self._broker.read()
        if failed is not None and after.declared == live.declared:
            raise failed
        remaining = _to_be_made(diff(wanted, after.declared))
        still = {(each.what, each.name) for each in _missing(remaining)}
        return ImportReport(
            failure=str(failed or ""),
            vhost=live.vhost,
            version=live.version,
            created=tuple(f"{each.what} {each.name}" for each in missing if (each.what, each.name) not in still),
            remaining=tuple(remaining),
            left_out=given.left_out,
            hazards=tuple(fatal),
        )

    async def _create(self, differences: Iterable[Difference], done: Applied) -> None:
        for difference in _missing(differences):
            if isinstance(difference.thing, Policy) or difference.way_out:
                continue
            try:
                await self._broker.create(difference.thing)
            except BrokerError as error:
                done.failure = f"{difference.what} '{difference.name}' could not be made; {error}"
                return
            done.created.append(f"{difference.what} {difference.name}")

    async def _delete(self, wanted: Design, live: LiveTopology, done: Applied) -> None:
        """Queues that are empty, then bindings that no dead letter needs, then exchanges that nothing hangs on."""
        await self._delete_queues([each for each in _differences(wanted, live) if _may_go(each)], live, done)
        if done.deleted:
            live = await self._broker.read()
        superfluous = [each for each in _differences(wanted, live) if each.kind is DifferenceKind.SUPERFLUOUS]
        standing = live.effective
        for difference in superfluous:
            if not isinstance(difference.thing, Binding):
                continue
            left = without(standing, difference.thing)
            if victim := cut_off(standing, left):
                done.kept[difference.name] = f"the way of {victim} would end nowhere"
            elif await self._take_away(difference, done):
                standing = left
        for difference in superfluous:
            if isinstance(difference.thing, Exchange):
                await self._take_away(difference, done)

    async def _delete_queues(self, superfluous: list[Difference], live: LiveTopology, done: Applied) -> None:
        queues = {each.name: each for each in superfluous if each.what == "queue"}
        if not queues:
            return
        targets = Graph(live.effective).targets
        sources = [name for name, reached in targets.items() if reached & queues.keys() and name not in queues]
        reasons = _not_to_go(queues, await self._broker.not_empty([*queues, *sources]), targets)
        for name, difference in queues.items():
            if name in reasons:
                done.kept[name] = reasons[name]
            else:
                # As it is there: its type decides how carefully it can be deleted.
                there = live.declared.queue(name) or difference.thing
                await self._take_away(msgspec.structs.replace(difference, thing=there), done)

    async def _take_away(self, difference: Difference, done: Applied) -> bool:
        assert not isinstance(difference.thing, Policy)  # noqa: S101  a file has none
        try:
            await self._broker.delete(difference.thing)
        except BrokerError as error:
            done.kept[difference.name] = str(error)
            return False
        done.deleted.append(f"{difference.what} {difference.name}")
        return True


def _lost(probes: Iterable[ProbeResult]) -> list[ProbeResult]:
    return [probe for probe in probes if probe.outcome == "lost"]


def _missing(differences: Iterable[Difference]) -> list[Difference]:
    return [each for each in differences if each.kind is DifferenceKind.MISSING]


def _to_be_made(differences: Iterable[Difference]) -> list[Difference]:
    """All but what is superfluous."""
    return [each for each in differences if each.kind is not DifferenceKind.SUPERFLUOUS]


def _differences(wanted: Design, live: LiveTopology) -> tuple[Difference, ...]:
    found = diff(wanted.topology, live.effective, owns=wanted.owns)
    wrong = {each.name for each in found if each.kind is DifferenceKind.DIFFERENT and each.what == "queue"}
    return tuple(_held_back(_with_policy(difference, live), wrong) for difference in found)


def _held_back(difference: Difference, wrong: Collection[str]) -> Difference:
    """A queue that is not as the file says may have no way out for what fails in it: nothing more is led into it."""
    thing = difference.thing
    if difference.kind is DifferenceKind.MISSING and isinstance(thing, Binding) and thing.destination in wrong:
        text = f"it is made once queue '{thing.destination}' is as the file says"
        return msgspec.structs.replace(difference, way_out=text)
    return difference


def _with_policy(difference: Difference, live: LiveTopology) -> Difference:
    """What a policy did is undone in the policy: say which."""
    if difference.kind is not DifferenceKind.DIFFERENT or not isinstance(difference.thing, Queue):
        return difference
    declared = live.declared.queue(difference.name)
    policy = live.states[difference.name].policy if difference.name in live.states else None
    if declared is None:
        return difference
    set_by_policy = {*POLICY_KEYS.values()} - declared.arguments.keys()
    if all(aspect.found is not None and aspect.name in set_by_policy for aspect in difference.aspects):
        names = ", ".join(aspect.name for aspect in difference.aspects)
        text = f"policy '{policy}' sets {names}: change or narrow it" if policy else f"an operator policy sets {names}"
        return msgspec.structs.replace(difference, by_policy=True, way_out=text)
    return difference


def _may_go(difference: Difference) -> bool:
    """Superfluous things, and queues that are to be made anew because they cannot be changed."""
    if difference.kind is DifferenceKind.SUPERFLUOUS:
        return True
    return difference.kind is DifferenceKind.DIFFERENT and difference.what == "queue" and not difference.by_policy


def _not_to_go(
    queues: Collection[str], busy: Mapping[str, str], targets: Mapping[str, frozenset[str]]
) -> dict[str, str]:
    """Why queues stay: they are in use, or the dead letters of one that stays and is in use go there.

    Such a queue may be empty, and still those letters would be lost while it is missing for a moment.
    """
    reasons = {name: busy[name] for name in queues if name in busy}
    in_use = set(busy)
    while True:
        found = {name: source for source in in_use for name in targets[source] if name in queues and name not in in_use}
        if not found:
            return reasons
        for name, source in found.items():
            reasons[name] = f"the dead letters of '{source}' go there, which is in use"
        in_use |= found.keys()


def _made_by(new: Topology, live: LiveTopology) -> list[Hazard]:
    """What is dangerous after an import: of what the file names, and what was not before of all else."""
    names = {each.name for each in new.exchanges} | {each.name for each in new.queues}
    names |= {each.name for each in new.policies} | {each.source for each in new.bindings}

    def found(topology: Topology) -> list[Hazard]:
        return hazards(Design(topology=in_force(topology), version=live.version))

    before = set(found(live.declared))
    after = found(_merged(new, live.declared))
    return [hazard for hazard in after if hazard.name in names or hazard not in before]


def _merged(new: Topology, old: Topology) -> Topology:
    """What stands there after an import: what is there stays as it is, but for policies, of which the new one holds."""
    exchanges, queues = {each.name for each in old.exchanges}, {each.name for each in old.queues}
    policies = {each.name for each in new.policies}
    return Topology(
        exchanges=(*old.exchanges, *(each for each in new.exchanges if each.name not in exchanges)),
        queues=(*old.queues, *(each for each in new.queues if each.name not in queues)),
        bindings=(*new.bindings, *old.bindings),
        policies=(*new.policies, *(each for each in old.policies if each.name not in policies)),
    )


def _check_ends(new: Topology, old: Topology) -> None:
    """3.x skips a binding whose end is missing, with a 204. Raises Invalid."""
    queues = {each.name for each in (*new.queues, *old.queues)}
    exchanges = {each.name for each in (*new.exchanges, *old.exchanges)} | BROKERS_EXCHANGES.keys()

    def missing(binding: Binding) -> str:
        if binding.source not in exchanges:
            return f"exchange '{binding.source}'"
        if binding.destination not in (queues if binding.destination_type == "queue" else exchanges):
            return f"{binding.destination_type} '{binding.destination}'"
        return ""

    for binding in new.bindings:
        if what := missing(binding):
            raise Invalid(f"definitions are incomplete; binding {binding}: {what} is neither in the file nor there")


async def _send_probes(
    broker: TopologyBroker,
    wanted: Design,
    live: LiveTopology,
    *,
    new: frozenset[str] = frozenset(),
    anyway: bool = False,
) -> tuple[ProbeResult, ...]:
    """Send each probe whose queues are new or idle, or all. One at a time where they share a dead queue:

    two probers on one queue would take each other's probes.
    """
    groups: dict[str, list[Probe]] = {}
    for family in wanted.families:
        groups.setdefault(family.dead.queue if family.dead else family.queue, []).extend(probes_of(family))
    if wanted.unroutable is not None:
        groups.setdefault(wanted.unroutable.queue, []).append(_into(wanted.unroutable))
    gate = asyncio.Semaphore(GROUPS_AT_ONCE_MAX)

    async def in_turn(probes: list[Probe]) -> list[ProbeResult]:
        async with gate:
            return [await _send(broker, probe, live, new=new, anyway=anyway) for probe in dict.fromkeys(probes)]

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(in_turn(probes)) for probes in groups.values()]
    return tuple(result for task in running for result in task.result())


async def _send(
    broker: TopologyBroker, probe: Probe, live: LiveTopology, *, new: frozenset[str], anyway: bool
) -> ProbeResult:
    for name in probe.queues:
        state = live.states.get(name)
        if anyway or name in new or (state is not None and state.is_idle):
            continue
        known = state is not None and state.messages_count is not None
        text = "has messages or consumers" if known else "is not known to be empty yet"
        return ProbeResult(name=probe.name, outcome="skipped", reason=f"'{name}' {text}; --probe sends it anyway")
    return await broker.probe(probe, anyway=anyway)


def _into(queue: FamilyQueue) -> Probe:
    name = f"{queue.exchange or '(default)'} → {queue.queue}"
    return Probe(name=name, exchange=queue.exchange, key=queue.key, arrives_in=queue.queue)


def probes_of(family: Family) -> Iterator[Probe]:
    """The paths that messages of a main queue take when they fail."""
    for wait in family.waits:
        yield Probe(
            name=f"{wait.queue} → {family.queue}",
            exchange=wait.exchange,
            key=wait.key,
            waits_in=wait.queue,
            arrives_in=family.queue,
            expires=True,
        )
    if family.dead is not None:
        yield _into(family.dead)
    if family.rejected_to is not None:
        yield Probe(
            name=f"{family.queue} rejected → {family.rejected_to}",
            exchange="",
            key=family.queue,
            rejected_in=family.queue,
            arrives_in=family.rejected_to,
        )
