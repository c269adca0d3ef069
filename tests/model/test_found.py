"""What the state machines have found, each as a small scenario of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.core.item import NewItem, RetryItem
from holdfast.core.requests.queue import ImportedItem
from holdfast.errors import QueueMissing, StorageFailed, TryAgain
from holdfast.ports.queue_store import Arrive, DyingItem, MoveTarget, RetryItems
from tests.model.installation import ModelInstallation
from tests.support.flaky import CATALOG

NEW = NewItem(payload=b"a", dedupe_key="k")


@pytest.fixture(params=["memory", "sqlite"])
def real(request: pytest.FixtureRequest) -> Iterator[ModelInstallation]:
    installation = ModelInstallation(request.param)
    yield installation
    installation.close()


def test_a_known_dedupe_key_is_answered_with_its_own_partition(real: ModelInstallation) -> None:
    real.run(real.queues.queues_create("q", requested_partitions=2))
    first = real.run(real.queues.queue_produce("q", [NEW])).items[0]
    again = real.run(real.queues.queue_produce("q", [NEW])).items[0]
    assert (first.partition, again) == (0, first)


def test_a_queue_that_was_never_read_is_listed_as_failing_and_not_as_a_bug(real: ModelInstallation) -> None:
    real.faults.down.add("q")
    real.run(real.queues.queues_create("q"))
    (logical,) = real.run(real.queues.queue_stats("q")).logical_queues
    assert logical.partitions[0].failures > 0
    assert isinstance(real.attempt(real.queues.storage_items_list("q")), StorageFailed)


def test_a_death_whose_answer_was_lost_is_carried_without_another_death(real: ModelInstallation) -> None:
    real.run(real.queues.queues_create("dead"))
    real.run(real.queues.queues_create("q", dead_queue="dead"))
    real.run(real.queues.queue_produce("q", [NEW]))
    (item,) = real.run(real.queues.queue_lease("q")).items
    real.faults.arm("after", "q", RetryItems)
    assert isinstance(real.attempt(real.queues.queue_retry("q", [RetryItem(id=item.id, dead=True)])), StorageFailed)
    real.advance(1.0)
    assert [letter.source_id for letter in real.run(real.queues.storage_items_list("dead"))] == [item.id]


def test_a_partition_that_was_added_while_the_store_is_down_is_there(real: ModelInstallation) -> None:
    real.run(real.queues.queues_create("q"))
    real.faults.down.add("q")
    real.run(real.queues.queues_update("q", requested_partitions=2))
    assert isinstance(real.attempt(real.queues.storage_items_delete("q", ["x"], partition=1)), TryAgain)


def test_a_letter_that_was_imported_before_it_arrived_and_then_completed_does_not_come_back(
    real: ModelInstallation,
) -> None:
    real.run(real.queues.queues_create("dead"))
    opened = real.manager.find("dead")
    assert opened is not None
    real.run(real.queues.storage_items_import("dead", [ImportedItem(payload=b"a", source_id="s")]))
    target = MoveTarget(queue_name="dead", generation=1, partition=0, storage="default", expire_timeout_us=1)
    dying_item = DyingItem(
        source_id="s",
        source_queue="q",
        target=target,
        kind="",
        encoding="",
        reference="",
        payload=b"a",
        death_reason="",
        death_attempts=1,
        died_at_us=1,
    )
    real.run(opened.operate(Arrive(0, [dying_item], 1)))
    (item,) = real.run(real.queues.queue_lease("dead")).items
    real.run(real.queues.queue_complete("dead", [item.id]))
    real.run(opened.operate(Arrive(0, [dying_item], 1)))
    assert real.run(real.queues.storage_items_list("dead")) == []


def test_a_change_of_queues_whose_answer_was_lost_is_known_here_too(real: ModelInstallation) -> None:
    real.faults.arm("after", CATALOG)
    assert isinstance(real.attempt(real.queues.queues_create("q")), StorageFailed)
    real.run(real.queues.queue_produce("q", [NEW]))
    real.faults.arm("after", CATALOG)
    assert isinstance(real.attempt(real.queues.queue_pause("q")), StorageFailed)
    assert real.run(real.queues.queues_info("q")).paused
    real.faults.arm("after", CATALOG)
    assert isinstance(real.attempt(real.queues.queues_delete("q", force=True)), StorageFailed)
    assert isinstance(real.attempt(real.queues.queues_info("q")), QueueMissing)
    real.run(real.queues.queues_create("q"))
    assert real.run(real.queues.storage_items_list("q")) == []


def test_a_change_of_queues_that_failed_before_its_commit_has_not_happened(real: ModelInstallation) -> None:
    real.faults.arm("before", CATALOG)
    assert isinstance(real.attempt(real.queues.queues_create("q")), StorageFailed)
    assert isinstance(real.attempt(real.queues.queues_info("q")), QueueMissing)
    real.run(real.queues.queues_create("q"))


def test_a_dead_queue_that_cannot_be_read_does_not_stop_the_start(real: ModelInstallation) -> None:
    real.run(real.queues.queues_create("dead"))
    real.run(real.queues.queues_create("q", dead_queue="dead"))
    real.faults.reads_down.add("dead")
    real.restart()
    real.run(real.queues.queue_produce("q", [NEW]))
    real.faults.reads_down.clear()
