"""The probes that prove a design: through every wait queue, into every dead queue, and by way of a rejection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from holdfast.core.topology import Design, Family
from holdfast.ports.topology import LiveTopology, Probe, ProbeResult, TopologyBroker

GROUPS_AT_ONCE_MAX = 4


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
        yield Probe(
            name=f"{family.dead.exchange or '(default)'} → {family.dead.queue}",
            exchange=family.dead.exchange,
            key=family.dead.key,
            arrives_in=family.dead.queue,
        )
    if family.rejected_to is not None:
        yield Probe(
            name=f"{family.queue} rejected → {family.rejected_to}",
            exchange="",
            key=family.queue,
            rejected_in=family.queue,
            arrives_in=family.rejected_to,
        )


async def send_probes(
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
        place = wanted.unroutable
        name = f"{place.exchange} → {place.queue}"
        probe = Probe(name=name, exchange=place.exchange, key=place.key, arrives_in=place.queue)
        groups.setdefault(place.queue, []).append(probe)
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
