"""What the layouts make: the names, keys and arguments that consumers and operators rely on."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.death import DEAD_QUEUES, QueueNames
from holdfast.core.topology.definitions import from_definitions
from holdfast.core.topology.layouts import design, parse_file
from holdfast.core.topology.model import Binding, Design, Exchange, Family, FamilyQueue, Queue, Version
from holdfast.core.topology.routing import Graph
from holdfast.core.topology.rules import hazards

V3, V4 = Version(3, 10), Version(4, 0)
EXAMPLES = Path(__file__).parents[2] / "examples" / "topologies"
SEVEN = {"upload.commands", "validator", "thumbnail", "extractor", "projection", "notification", "audit"}


def made(text: str, version: Version = V3) -> Design:
    return design(parse_file(text.encode(), source="t.toml"), version)


def example(name: str, version: Version = V3) -> Design:
    return design(parse_file((EXAMPLES / f"{name}.toml").read_bytes(), source=name), version)


def queue(design: Design, name: str) -> Queue:
    found = design.topology.queue(name)
    assert found is not None, name
    return found


def test_per_consumer_is_an_exchange_and_a_queue_for_retry_and_for_dead_letters_each() -> None:
    found = made('[unroutable]\nenabled = false\n[queues."q.X"]')
    assert found.topology.exchanges == (
        Exchange(name="dlq.q.X", type="direct"),
        Exchange(name="retry.q.X", type="direct"),
    )
    assert found.topology.queues == (
        Queue(name="q.X", arguments={"x-dead-letter-exchange": "retry.q.X", "x-dead-letter-routing-key": "retry"}),
        Queue(name="q.X.dlq"),
        Queue(
            name="q.X.retry",
            arguments={"x-message-ttl": 15000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q.X"},
        ),
    )
    assert found.topology.bindings == (
        Binding(source="dlq.q.X", destination="q.X.dlq", key="parking"),
        Binding(source="retry.q.X", destination="q.X.retry", key="retry"),
    )
    assert found.families == (
        Family(
            queue="q.X",
            layout="per-consumer",
            waits=(FamilyQueue(queue="q.X.retry", exchange="retry.q.X", key="retry", delay_ms=15000),),
            dead=FamilyQueue(queue="q.X.dlq", exchange="dlq.q.X", key="parking"),
            rejected_to="q.X.retry",
        ),
    )


def test_the_media_example_is_the_seven_queues_with_their_bindings() -> None:
    found = example("media")
    mains = {f"q.{name}" for name in SEVEN}
    assert {family.queue for family in found.families} == mains
    names = {each.name for each in found.topology.queues}
    assert names == {f"{main}{suffix}" for main in mains for suffix in ("", ".retry", ".dlq")} | {"unroutable"}
    fed = {(b.destination, b.source, b.key) for b in found.topology.bindings if b.source.startswith("domain.")}
    assert fed == {
        ("q.upload.commands", "domain.commands", "commands.upload.#"),
        ("q.upload.commands", "domain.commands", "commands.file.reprocess.*"),
        ("q.validator", "domain.events", "files.uploaded.*"),
        ("q.thumbnail", "domain.events", "files.validated.*"),
        ("q.extractor", "domain.events", "files.validated.*"),
        ("q.projection", "domain.events", "#"),
        ("q.notification", "domain.events", "processing.#"),
        ("q.notification", "domain.events", "files.rejected.*"),
        ("q.audit", "domain.events", "#"),
    }


def test_the_definitions_that_ship_are_the_media_example() -> None:
    data = (EXAMPLES / "media.definitions.json").read_bytes()
    assert from_definitions(data, vhost="anything", source="media").topology == example("media").topology


def test_quorum_goes_through_the_default_exchange_and_parks_by_a_fanout() -> None:
    found = made('[queues.orders]\nlayout = "quorum"\nretry_delay = "5s"', V4)
    safe = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish", "x-delivery-limit": -1}
    assert {each.type for each in found.topology.queues} == {"quorum"}
    assert queue(found, "orders").arguments == {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "orders.retry",
        **safe,
    }
    assert queue(found, "orders.retry").arguments == {
        "x-message-ttl": 5000,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "orders",
        **safe,
    }
    assert queue(found, "orders.dlq").arguments == {"x-delivery-limit": -1}
    exchange = found.topology.exchange("orders.dlq")
    assert exchange is not None
    assert exchange.type == "fanout"


def test_a_ladder_is_one_wait_queue_per_delay() -> None:
    found = made('[queues.q]\nretry_delay = ["1s", "1m", "1h"]')
    (family,) = found.families
    assert [(wait.queue, wait.key, wait.delay_ms) for wait in family.waits] == [
        ("q.retry.1", "retry.1", 1_000),
        ("q.retry.2", "retry.2", 60_000),
        ("q.retry.3", "retry.3", 3_600_000),
    ]
    # What the broker itself dead-letters has the one key that the main queue gives it: the first step.
    keys = {(b.destination, b.key) for b in found.topology.bindings if b.source == "retry.q"}
    assert keys == {
        ("q.retry.1", "retry"),
        ("q.retry.1", "retry.1"),
        ("q.retry.2", "retry.2"),
        ("q.retry.3", "retry.3"),
    }
    assert family.rejected_to == "q.retry.1"


def test_shared_dlq_is_one_dead_queue_for_many_and_a_timeout_for_each() -> None:
    found = example("shared-dlq")
    assert {family.dead.queue for family in found.families if family.dead} == {"imageviewer.dlq"}
    assert len(found.families) == 7
    for family in found.families:
        assert queue(found, family.queue).arguments == {
            "x-message-ttl": 86_400_000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "imageviewer.dlq",
        }
    assert queue(found, "imageviewer.dlq").arguments == {}


def test_names_and_suffixes_are_settings() -> None:
    text = """
    [defaults]
    retry_delay = ["1s", "2s"]
    names = { wait_queue = "{queue}-wait", step_suffix = "-{step}", dead_queue = "{queue}-dead", retry_key = "again" }
    [queues.q]
    names = { dead_exchange = "graves", retry_exchange = "" }
    """
    (family,) = made(text).families
    assert [wait.queue for wait in family.waits] == ["q-wait-1", "q-wait-2"]
    assert [(wait.exchange, wait.key) for wait in family.waits] == [("", "q-wait-1"), ("", "q-wait-2")]
    assert family.dead == FamilyQueue(queue="q-dead", exchange="graves", key="parking")


def test_every_exchange_has_a_net_unless_it_is_switched_off() -> None:
    found = made('[exchanges.x]\n[exchanges.y]\nalternate_exchange = "x"\n[queues.q]')
    assert found.unroutable == FamilyQueue(queue="unroutable", exchange="unroutable", key="")
    nets = {exchange.name: exchange.alternate for exchange in found.topology.exchanges}
    assert nets == {"x": "unroutable", "y": "x", "retry.q": "unroutable", "dlq.q": "unroutable", "unroutable": None}
    off = made("[unroutable]\nenabled = false\n[exchanges.x]")
    assert [exchange.alternate for exchange in off.topology.exchanges] == [None]
    assert any("no alternate exchange" in hazard.reason for hazard in hazards(off))


@pytest.mark.parametrize("version", [V3, V4])
def test_a_design_has_remarks_at_the_most(version: Version) -> None:
    for name in ("media", "quorum", "shared-dlq"):
        assert [hazard for hazard in hazards(example(name, version)) if hazard.fatal] == []
    assert hazards(example("quorum", version)) == []
    assert {hazard.reason[:15] for hazard in hazards(example("media", version))} == {"a classic queue"}


LEADING = """
[defaults]
layout = "{layout}"
[exchanges.events]
[queues.orders]
bindings = [{{ exchange = "events", key = "#" }}]
{more}
"""


@pytest.mark.parametrize(
    ("layout", "more", "dead_queue", "leading"),
    [
        ("per-consumer", "", "orders.dlq", {"orders"}),
        ("quorum", "", "orders.dlq", {"orders"}),
        ("shared-dlq", "", "dlq", {"orders"}),
        ("shared-dlq", "[queues.files]", "dlq", {"orders", "files"}),
        ("per-consumer", "[queues.files]", "orders.dlq", {"orders"}),
        ("per-consumer", "", "unroutable", set()),  # what no binding takes has died nowhere
        ("quorum", "", "unroutable", set()),
    ],
)
def test_which_queues_lead_to_a_dead_queue(layout: str, more: str, dead_queue: str, leading: set[str]) -> None:
    made = design(parse_file(LEADING.format(layout=layout, more=more).encode(), source="f"), Version(4, 0))
    names = QueueNames(dead_queues=(*DEAD_QUEUES, "dlq"))
    assert Graph(made.topology).leading_to(dead_queue, names.is_main) == leading
