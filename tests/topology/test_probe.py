"""Probes: they find a path that is broken, and they leave everything else in the queues as it was."""

from __future__ import annotations

import pytest

from holdfast.engines.rabbitmq.consumer import ResumingConsumer
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.topology import HELD_COUNT_MAX, send_probe
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.ports.topology import Probe
from tests.support.amqp import Admin, outgoing
from tests.support.eventually import eventually
from tests.topology.conftest import file, topologies

pytestmark = pytest.mark.rabbitmq

QUIET = '[unroutable]\nenabled = false\n[queues.q]\nretry_delay = "1h"\n'


async def test_busy_queues_are_probed_only_on_demand_and_keep_their_messages(every_admin: Admin) -> None:
    letters = [f"letter {number}".encode() for number in range(50)]
    wanted = file(QUIET + 'layout = "quorum"')
    async with topologies(every_admin) as service, RabbitPublisher(every_admin.broker_url()) as publisher:
        await service.apply(wanted, probe=False)
        for queue in ("q", "q.dlq"):
            for letter in letters:
                assert (await publisher.publish([outgoing(queue, letter)]))[0].stored

        async def counted() -> bool:
            return await every_admin.count("q") == len(letters) == await every_admin.count("q.dlq")

        await eventually(counted)
        done = await service.apply(wanted)
        assert {probe.outcome for probe in done.probes} == {"skipped"}
        assert done.is_done
        done = await service.apply(wanted, probe=True)
        assert {probe.outcome for probe in done.probes} == {"arrived"}, done.probes
        for queue in ("q", "q.dlq"):
            assert [letter.body for letter in await every_admin.drain(queue, len(letters))] == letters
        assert await every_admin.count("q.retry") == 0


async def test_a_queue_with_a_consumer_is_left_alone(admin: Admin) -> None:
    wanted = file(QUIET)
    async with topologies(admin) as service:
        await service.apply(wanted, probe=False)
        async with ResumingConsumer(admin.broker_url(), "q") as consumer:
            outcomes = {probe.name: probe for probe in (await service.apply(wanted)).probes}
            assert outcomes["q.retry → q"].outcome == "skipped"
            assert await consumer.batch(timeout_s=0.0) == []


async def test_a_delay_is_not_waited_for_but_one_that_others_wait_out_is_not_cut_short(admin: Admin) -> None:
    wanted = file(QUIET)
    async with topologies(admin) as service, RabbitPublisher(admin.broker_url()) as publisher:
        assert (await service.apply(wanted)).is_done  # an hour's delay, in no time
        assert (await publisher.publish([outgoing("q.retry", b"waits")]))[0].stored
        outcomes = {probe.name: probe for probe in (await service.apply(wanted, probe=True)).probes}
        assert "cannot be cut short behind others" in outcomes["q.retry → q"].reason
        assert await admin.count("q.retry") == 1


async def test_a_path_that_does_not_lead_there_is_found_out(
    every_admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engines.rabbitmq.topology.PROBE_TIMEOUT_S", 0.5)
    await every_admin.queue("source")  # without a dead-letter exchange: what is rejected is gone
    await every_admin.queue("end")
    await every_admin.exchange("nowhere", "fanout")
    url = BrokerUrl.parse(every_admin.node.url(every_admin.vhost))
    paths = {
        "unbound": (Probe(name="unbound", exchange="nowhere", key="", arrives_in="end"), "returned"),
        "missing": (Probe(name="missing", exchange="gone", key="", arrives_in="end"), "refused"),
        "astray": (Probe(name="astray", exchange="", key="source", arrives_in="end"), "did not arrive in 'end'"),
        "rejected": (
            Probe(name="rejected", exchange="", key="source", rejected_in="source", arrives_in="end"),
            "did not arrive in 'end'",
        ),
        "first": (
            Probe(name="first", exchange="", key="end", rejected_in="source", arrives_in="end"),
            "did not arrive in 'source'",
        ),
        "no queue": (Probe(name="no queue", exchange="", key="gone", arrives_in="gone"), "no queue 'gone'"),
    }
    for probe, reason in paths.values():
        result = await send_probe(url, probe, {})
        assert result.outcome == "lost", result
        assert reason in result.reason
        assert "holdfast-probe-" in result.reason
    deep = await send_probe(url, paths["astray"][0], {"end": HELD_COUNT_MAX})
    assert deep.outcome == "skipped"


async def test_a_lost_probe_makes_an_apply_incomplete(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody consumes from the dead queue and takes the probe: then it has not been shown to arrive."""
    monkeypatch.setattr("holdfast.engines.rabbitmq.topology.PROBE_TIMEOUT_S", 0.3)
    wanted = file(QUIET)
    async with topologies(admin) as service:
        await service.apply(wanted, probe=False)
        await admin.channel.call(methods.Consume(queue="q.dlq", arguments={"x-priority": 10}))
        found = await service.check(wanted, probe=True)
        assert [probe.name for probe in found.probes if probe.outcome == "lost"] == ["dlq.q → q.dlq"]
        assert not found.is_clean
        assert not (await service.apply(wanted, probe=True)).is_done
