"""Export and import: what comes back is the same model, and what the broker ignored in silence is said."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.core.topology.definitions import Definitions, from_definitions
from holdfast.core.topology.diff import DifferenceKind
from holdfast.core.topology.model import Binding, Exchange, Policy, Queue, Topology, topology
from holdfast.engines.rabbitmq.topology import RabbitTopology
from holdfast.errors import BrokerRefused, Invalid
from holdfast.services.topology import Topologies
from tests.support.amqp import Admin
from tests.topology.conftest import EXAMPLES, broker, example, topologies

pytestmark = pytest.mark.rabbitmq


async def test_the_definitions_that_ship_are_imported_and_are_the_example(every_admin: Admin) -> None:
    data = (EXAMPLES / "media.definitions.json").read_bytes()
    given = from_definitions(data, vhost=every_admin.vhost, source="media")
    async with topologies(every_admin) as service:
        done = await service.import_definitions(given)
        assert done.remaining == ()
        assert len(done.created) == 17 + 22 + 24
        assert (await service.check(example("media"))).is_clean
        assert (await service.import_definitions(given)).created == ()


async def test_what_is_exported_is_what_the_brokers_own_export_says(every_admin: Admin) -> None:
    node, vhost = every_admin.node, every_admin.vhost
    odd = 'größe/ "1" #'
    await every_admin.quorum_queue(odd, **{"x-dead-letter-exchange": ""})
    await every_admin.exchange(odd, "headers")
    await every_admin.bind(odd, odd, "key with spaces")
    await every_admin.queue("plain", **{"x-max-length": 2**40})
    node.api("PUT", f"/policies/{vhost}/p", {"pattern": "^pl", "definition": {"max-length": 7}, "apply-to": "queues"})
    async with topologies(every_admin) as service:
        ours = msgspec.json.encode(await service.export())
    theirs = node.api("GET", f"/definitions/{vhost}").content
    model = from_definitions(ours, vhost=vhost, source="ours").topology
    assert model == from_definitions(theirs, vhost=vhost, source="theirs").topology
    assert model.queue(odd) is not None
    async with Admin.open(node, f"{vhost}-copy") as copy, topologies(copy) as service:
        given = from_definitions(ours, vhost=copy.vhost, source="ours")
        assert (await service.import_definitions(given, accept_hazards=True)).remaining == ()
        again = from_definitions(msgspec.json.encode(await service.export()), vhost=copy.vhost, source="copy")
        assert again.topology == model


async def test_what_the_broker_ignores_in_silence_is_named(every_admin: Admin) -> None:
    await every_admin.queue("q", **{"x-max-priority": 3})
    await every_admin.exchange("x", "direct")
    wanted = topology(
        exchanges=[Exchange(name="x", type="topic")],
        queues=[Queue(name="q", arguments={"x-max-priority": 5}), Queue(name="new")],
        bindings=[Binding(source="x", destination="q", key="k")],
        policies=[Policy(name="p", pattern="^new$", definition={"max-length": 7}, apply_to="queues")],
    )
    async with topologies(every_admin) as service:
        done = await service.import_definitions(Definitions(topology=wanted), accept_hazards=True)
        assert [str(hazard)[:20] for hazard in done.hazards] == ["'new': when it is fu"]
        assert set(done.created) == {"queue new", "policy p", "binding x → queue q by 'k'"}
        assert {(d.kind, d.name) for d in done.remaining} == {
            (DifferenceKind.DIFFERENT, "x"),
            (DifferenceKind.DIFFERENT, "q"),
        }
        assert "x-max-priority is 3, wanted 5" in " ".join(map(str, done.remaining))
        changed = msgspec.structs.replace(wanted.policies[0], priority=4)
        done = await service.import_definitions(
            Definitions(topology=msgspec.structs.replace(wanted, policies=(changed,))), accept_hazards=True
        )
        assert "policy" not in {d.what for d in done.remaining}


DEAD_LETTERING = {"x-dead-letter-exchange": "dlx"}
DEAD = [Queue(name="q", arguments=DEAD_LETTERING), Queue(name="q.dlq")]
LOSING = [
    ("a dead-letter exchange by policy that leads nowhere", "'q': its dead letters go to exchange 'gone'",
     topology(queues=[Queue(name="q")],
              policies=[Policy(name="p", pattern="^q$", definition={"dead-letter-exchange": "gone"})])),
    ("a time to live by policy on the dead queue", "'q.dlq': x-message-ttl on a dead queue",
     topology(exchanges=[Exchange(name="dlx", type="fanout")], queues=DEAD,
              bindings=[Binding(source="dlx", destination="q.dlq")],
              policies=[Policy(name="p", pattern="dlq", definition={"message-ttl": 1000}, apply_to="queues")])),
    ("# bound to a direct exchange", "'dlx': it is a direct exchange: to '#' only messages go",
     topology(exchanges=[Exchange(name="dlx")], queues=DEAD,
              bindings=[Binding(source="dlx", destination="q.dlq", key="#")])),
]  # fmt: skip


@pytest.mark.parametrize(("said", "wanted"), [each[1:] for each in LOSING], ids=[each[0] for each in LOSING])
async def test_what_a_file_makes_is_judged_with_its_policies(admin: Admin, said: str, wanted: Topology) -> None:
    given = Definitions(topology=wanted)
    async with broker(admin) as found, topologies(admin) as service:
        planned = await service.check(given)
        assert said in " ".join(str(hazard) for hazard in planned.remarks if hazard.fatal)
        assert not planned.is_clean
        with pytest.raises(Invalid, match=said):
            await service.import_definitions(given)
        assert (await found.read()).declared == topology()


async def test_a_policy_of_a_file_is_judged_on_what_is_there_already(admin: Admin) -> None:
    await admin.queue("old")
    policy = Policy(name="p", pattern="^o", definition={"message-ttl": 1000}, apply_to="queues")
    async with topologies(admin) as service:
        with pytest.raises(Invalid, match="'old': what expires in it is deleted"):
            await service.import_definitions(Definitions(topology=topology(policies=[policy])))
        weaker = Policy(name="p", pattern="^o", definition={"queue-mode": "lazy"}, priority=1)
        safe = topology(policies=[policy, msgspec.structs.replace(weaker, name="stronger")])
        assert (await service.import_definitions(Definitions(topology=safe))).remaining == ()


async def test_what_a_binding_of_a_file_does_to_queues_that_it_does_not_name_is_judged(admin: Admin) -> None:
    """The dead letters of a queue that stands there would come back to it, and expire all the way round."""
    await admin.exchange("dlx")
    await admin.queue("old.dlq")
    dead = {"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": "k"}
    for name in ("old", "other"):
        await admin.queue(name, **{"x-message-ttl": 1000}, **dead)
    await admin.bind("old.dlq", "dlx", "k")
    wanted = topology(bindings=[Binding(source="dlx", destination="old", key="k")])
    async with topologies(admin) as service:
        with pytest.raises(Invalid, match="'old': x-message-ttl on every queue of the cycle"):
            await service.import_definitions(Definitions(topology=wanted))
        done = await service.import_definitions(Definitions(topology=wanted), accept_hazards=True)
        assert [hazard.name for hazard in done.hazards] == ["old"]


async def test_what_was_made_before_a_refusal_is_in_the_answer(admin: Admin) -> None:
    wanted = topology(queues=[Queue(name="a"), Queue(name="b")])

    class Half(RabbitTopology):
        async def import_topology(self, topology: Topology) -> None:
            await super().import_topology(msgspec.structs.replace(topology, queues=topology.queues[:1]))
            raise BrokerRefused("no more", reply_code=400)

    async with Half(admin.url, management=admin.node.management_url) as half:
        done = await Topologies(half).import_definitions(Definitions(topology=wanted))
    assert (done.created, done.failure) == (("queue a",), "no more")
    assert [each.name for each in done.remaining] == ["b"]


async def test_a_bad_import_changes_nothing(every_admin: Admin) -> None:
    unsafe = topology(queues=[Queue(name="q", arguments={"x-message-ttl": 5})])
    loose = topology(
        exchanges=[Exchange(name="x")], queues=[Queue(name="q")], bindings=[Binding(source="x", destination="gone")]
    )
    strange = topology(queues=[Queue(name="q", arguments={"x-max-priority": "many"})])
    async with broker(every_admin) as found, topologies(every_admin) as service:
        with pytest.raises(Invalid, match="definitions are unsafe; 'q': what expires in it is deleted"):
            await service.import_definitions(Definitions(topology=unsafe))
        with pytest.raises(Invalid, match="queue 'gone' is neither in the file nor there"):
            await service.import_definitions(Definitions(topology=loose))
        with pytest.raises(BrokerRefused, match="definitions were refused"):
            await service.import_definitions(Definitions(topology=strange))
        assert (await found.read()).declared == topology()
        done = await service.import_definitions(Definitions(topology=unsafe), accept_hazards=True)
        assert [hazard.name for hazard in done.hazards] == ["q"]
