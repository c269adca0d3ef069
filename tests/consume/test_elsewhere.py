"""The same suite, its core, on PostgreSQL and on a server of ours over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

import holdfast
from holdfast.errors import NotStored, OutcomeUnknown
from holdfast.proof.proxy import Proxy
from tests.consume import test_consume as suite
from tests.consume import test_publish as publishes
from tests.consume.brokers import BrokerUnderTest, EmbeddedUnderTest
from tests.faults.serving import TOKEN, Serving
from tests.support.postgres import Cluster

test_attempts = suite.test_attempts_is_how_often_the_handler_runs_then_it_is_parked
test_success_later = suite.test_a_failure_that_passes_is_a_success_later
test_permanent_errors = suite.test_a_permanent_error_parks_at_once
test_neighbours = suite.test_one_bad_message_takes_no_neighbour_along
test_stop = suite.test_a_stop_lets_running_handlers_end_and_takes_nothing_new
test_published = publishes.test_what_is_published_is_handled_as_it_was_said
test_bodies = publishes.test_bytes_stay_bytes_and_values_are_json
test_not_stored = publishes.test_what_no_queue_takes_is_known_not_to_be_stored
test_sending = publishes.test_an_app_sends_without_consuming
test_threads = publishes.test_a_thread_publishes_through_the_app_that_runs
test_refused = publishes.test_what_makes_no_sense_is_refused_before_anything_is_sent
test_given_back = suite.test_what_is_not_done_when_the_stop_is_over_goes_back


@pytest.fixture(params=["http", pytest.param("postgres", marks=pytest.mark.postgres)])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BrokerUnderTest]:
    """A server as a process of its own, or a database."""
    if request.param == "http":
        async with Serving(f"sqlite:///{tmp_path}/data", tmp_path) as server:
            await server.start()
            yield EmbeddedUnderTest(server.address, token=TOKEN)
        return
    cluster: Cluster = request.getfixturevalue("postgres")
    name = f"consume_{uuid4().hex}"
    yield EmbeddedUnderTest(cluster.create_database(name))
    cluster.drop_database(name)


async def test_a_server_that_is_away_is_waited_for_and_a_repeat_is_one_item(tmp_path: Path) -> None:
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path) as server:
        await server.start()
        async with server.client() as queues, holdfast.App(server.address, token=TOKEN).sending() as app:
            await queues.queues_create("q")
            assert (await app.publish("q", b"1", id="one")).sent_count == 1
            await server.close()
            with pytest.raises(NotStored, match="nothing was sent"):
                await app.publish("q", b"2", timeout="2s")
            waiting = asyncio.create_task(app.publish("q", b"1", id="one", timeout="5m"))
            await server.start()
            await waiting
            assert [item.payload for item in await queues.storage_items_list("q")] == [b"1"]


async def test_an_answer_that_is_lost_is_unknown_and_its_repeat_is_one_item(tmp_path: Path) -> None:
    async with (
        Serving(f"sqlite:///{tmp_path}/data", tmp_path) as server,
        Proxy("127.0.0.1", server.port) as proxy,
        holdfast.App(f"http://127.0.0.1:{proxy.port}", token=TOKEN).sending() as app,
    ):
        await server.start()
        async with server.client() as queues:
            await queues.queues_create("q")
            trip = proxy.cut_when("down", lambda recent: b"HTTP/1.1" in recent)
            with pytest.raises(OutcomeUnknown, match="may be stored or not"):
                await app.publish("q", b"1", id="one", repeat=False)
            assert trip.fired.is_set()
            trip = proxy.cut_when("down", lambda recent: b"HTTP/1.1" in recent)
            published = await app.publish_many("q", [b"1", b"2"], ids=["one", "two"])
            assert trip.fired.is_set()
            assert {one.sent_count for one in published} == {2}
            assert [item.payload for item in await queues.storage_items_list("q")] == [b"1", b"2"]


async def test_a_token_that_may_not_is_known_not_to_have_stored_anything(tmp_path: Path) -> None:
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path) as server:
        await server.start()
        async with holdfast.App(server.address, token="wrong").sending() as app:
            with pytest.raises(NotStored, match=r"refused .403., unauthorized"):
                await app.publish("q", b"x")
