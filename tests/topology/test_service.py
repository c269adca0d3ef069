"""The topology service over a broker that fails wherever one likes: cut off anywhere, it goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.core.topology.diff import DifferenceKind
from holdfast.core.topology.layouts import TopologyFile, design, parse_file
from holdfast.core.topology.model import Binding, Exchange, Queue, Topology, Version, topology
from holdfast.core.topology.routing import Graph
from holdfast.errors import BrokerError
from holdfast.ports.topology import LiveTopology, Probe, ProbeResult, QueueState, Thing
from holdfast.services.topology import Topologies, probes_of

EXAMPLES = Path(__file__).parents[2] / "examples" / "topologies"
V3, V4 = Version(3, 10), Version(4, 0)


class Fake:
    """A virtual host in memory."""

    vhost = "/"

    def __init__(self, *, version: Version = V3, fails_after: int | None = None) -> None:
        self.things: list[Thing] = []
        self.fails_after = fails_after
        self.forgets = ""  # a queue that the broker does not make, and does not say so
        self.probes: list[str] = []
        self.busy: set[str] = set()
        self._version = version

    async def version(self) -> Version:
        return self._version

    async def read(self) -> LiveTopology:
        found = self.standing()
        states = {
            queue.name: QueueState(messages_count=int(queue.name in self.busy), consumers_count=0)
            for queue in found.queues
        }
        return LiveTopology(vhost=self.vhost, version=self._version, declared=found, effective=found, states=states)

    async def create(self, thing: Thing) -> None:
        if self.fails_after is not None and len(self.things) >= self.fails_after:
            raise BrokerError("the broker is gone")
        if not isinstance(thing, Queue) or thing.name != self.forgets:
            self.things.append(thing)

    async def delete(self, thing: Thing) -> None:
        self.things.remove(thing)
        if isinstance(thing, Queue):  # its bindings go with it
            kept = [each for each in self.things if not isinstance(each, Binding) or each.destination != thing.name]
            self.things = kept

    async def not_empty(self, queues: Sequence[str]) -> dict[str, str]:
        return {name: "it has messages" for name in queues if name in self.busy}

    async def import_topology(self, topology: Topology) -> None:
        raise NotImplementedError

    async def probe(self, probe: Probe, *, anyway: bool) -> ProbeResult:
        self.probes.append(probe.name)
        return ProbeResult(name=probe.name, outcome="arrived")

    def standing(self) -> Topology:
        return topology(
            exchanges=[thing for thing in self.things if isinstance(thing, Exchange)],
            queues=[thing for thing in self.things if isinstance(thing, Queue)],
            bindings=[thing for thing in self.things if isinstance(thing, Binding)],
        )


def example(name: str) -> TopologyFile:
    return parse_file((EXAMPLES / f"{name}.toml").read_bytes(), source=name)


@pytest.mark.parametrize("version", [V3, V4])
@pytest.mark.parametrize("name", ["media", "quorum", "shared-dlq"])
async def test_wherever_an_apply_is_cut_off_no_queue_is_fed_without_a_way_out(name: str, version: Version) -> None:
    file = example(name)
    wanted = design(file, version)
    families = {family.queue: family for family in wanted.families}
    count = len(wanted.topology.exchanges) + len(wanted.topology.queues) + len(wanted.topology.bindings)
    for cut in range(count):
        broker = Fake(version=version, fails_after=cut)
        done = await Topologies(broker).apply(file)
        assert done.failure
        assert not done.is_done
        assert done.has_changed is bool(cut)
        assert not broker.probes
        standing = broker.standing()
        graph = Graph(standing)
        for binding in standing.bindings:
            if binding.destination in families:
                family = families[binding.destination]
                assert graph.targets[family.queue] == {family.rejected_to}
                assert family.dead is not None
                assert family.dead.queue in graph.possible(family.dead.exchange, family.dead.key)
        broker.fails_after = None
        again = await Topologies(broker).apply(file)
        assert again.is_done
        assert broker.standing() == wanted.topology


async def test_what_the_broker_did_not_make_is_found_when_it_is_read_back() -> None:
    broker = Fake()
    broker.forgets = "q.audit.dlq"
    done = await Topologies(broker).apply(example("media"))
    assert [(each.kind, each.name) for each in done.remaining] == [(DifferenceKind.MISSING, "q.audit.dlq")]
    assert not done.is_done
    assert not broker.probes


async def test_probes_go_through_every_failing_path_once() -> None:
    broker = Fake()
    await Topologies(broker).apply(example("shared-dlq"))
    assert len(broker.probes) == len(set(broker.probes)) == 1 + 7 + 1  # the dead queue, each rejection, the unroutable
    broker = Fake()
    await Topologies(broker).apply(example("quorum"))
    assert {"billing.orders.retry.3 → billing.orders", "shipping.orders rejected → shipping.orders.retry"} <= set(
        broker.probes
    )
    families = design(example("quorum"), V3).families
    assert len(broker.probes) == sum(len(list(probes_of(family))) for family in families) + 1


async def test_old_queues_with_messages_are_probed_only_on_demand() -> None:
    broker = Fake()
    service = Topologies(broker)
    await service.apply(example("shared-dlq"), probe=False)
    assert broker.probes == []
    broker.busy = {"imageviewer.dlq"}
    done = await service.apply(example("shared-dlq"))
    assert broker.probes == ["unroutable → unroutable"]
    assert {probe.reason for probe in done.probes if probe.outcome == "skipped"} == {
        "'imageviewer.dlq' has messages or consumers; --probe sends it anyway"
    }
    await service.check(example("shared-dlq"))
    assert len(broker.probes) == 1
    await service.check(example("shared-dlq"), probe=True)
    assert len(broker.probes) == 1 + 9


async def test_a_file_that_takes_queues_back_deletes_those_that_are_empty_and_owned() -> None:
    text = 'owns = ["q.*"]\n[unroutable]\nenabled = false\n[queues."q.a"]\n'
    broker = Fake()
    service = Topologies(broker)
    await service.apply(parse_file(f'{text}[queues."q.b"]\n[queues."q.c"]\n[queues.other]'.encode(), source="t"))
    broker.busy = {"q.c.dlq"}
    done = await service.apply(parse_file(text.encode(), source="t"), delete=True)
    names = {queue.name for queue in broker.standing().queues}
    assert names == {f"{queue}{suffix}" for queue in ("q.a", "other") for suffix in ("", ".retry", ".dlq")} | {
        "q.c.dlq"
    }
    assert done.kept == {"q.c.dlq": "it has messages"}
    assert not done.is_done


async def test_no_queue_goes_that_the_dead_letters_of_one_in_use_go_to() -> None:
    """All three differ, and only the main queue is in use: its wait queue, though empty, must not be missing."""
    text = '[unroutable]\nenabled = false\n[queues."q.a"]\nlayout = "{}"\nretry_delay = "{}"\n'
    broker = Fake()
    service = Topologies(broker)
    await service.apply(parse_file(text.format("per-consumer", "1s").encode(), source="t"))
    broker.busy = {"q.a"}
    done = await service.apply(parse_file(text.format("quorum", "2s").encode(), source="t"), delete=True)
    assert done.kept == {
        "q.a": "it has messages",
        "q.a.retry": "the dead letters of 'q.a' go there, which is in use",
        "retry.q.a → queue q.a.retry by 'retry'": "the way of the dead letters of queue 'q.a' would end nowhere",
    }
    assert "queue q.a.dlq" in done.deleted
    assert Graph(broker.standing()).targets["q.a"] == {"q.a.retry"}
    broker.busy = set()
    done = await service.apply(parse_file(text.format("quorum", "2s").encode(), source="t"), delete=True)
    assert done.deleted == ["queue q.a", "queue q.a.retry"]
    assert done.is_done
