"""The three commits of a death, one at a time: between any two of them the process may die, the target may fail, and
somebody may work on the copy. Whatever happens, a dead letter ends in exactly one place, and only once."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.core.item import NewItem, RetryItem
from holdfast.core.requests.queue import ImportedItem
from holdfast.errors import HoldfastError, NothingToLease
from holdfast.ports.queue_store import Arrive, Forget, Operation, Remove, Result, Revive
from holdfast.services.queue.logical_queue import LogicalQueue
from tests.model.audit import Seen, look
from tests.model.installation import ModelInstallation, settings_for
from tests.model.queue_model import Queue

pytestmark = pytest.mark.slow

STEPS = (Arrive, Remove, Revive, Forget)
_operate = LogicalQueue.operate


class MoveMachine(RuleBasedStateMachine):
    """`kind` is the store; a subclass names it. `waiting` are the mover's commits that nobody has let through yet."""

    kind = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[asyncio.Event] = []
        self.is_open = False
        self.is_starting = False
        machine = self

        async def operate(queue: LogicalQueue, operation: Operation, **options: Any) -> Result:
            starting = machine.is_starting and isinstance(operation, Forget)  # part of a start, not of the mover
            if isinstance(operation, STEPS) and not machine.is_open and not starting:
                turn = asyncio.Event()
                machine.waiting.append(turn)
                await turn.wait()
            return await _operate(queue, operation, **options)

        self._patch = patch.object(LogicalQueue, "operate", operate)
        self._patch.start()
        self.real = ModelInstallation(self.kind)
        self.alive: dict[bytes, str] = {}  # payload → source_id: died, and nobody has finished the copy
        self.finished: dict[bytes, str] = {}
        self._count = 0

    @initialize(partitions=st.integers(1, 2))
    def begin(self, partitions: int) -> None:
        self.partitions = partitions
        self.real.run(self.real.queues.queues_create("dead", requested_partitions=partitions))
        self.real.run(
            self.real.queues.queues_create("work", dead_queue="dead", max_attempts=1, requested_partitions=partitions)
        )

    def teardown(self) -> None:
        try:
            self._let_go()
            self.real.heal(self._is_settled)
            self.every_letter_is_in_one_place()
            seen = self._look("dead")
            assert seen.items.keys() == self.alive.keys()
            self.real.restart()
            arrivals = self.real.run(self.real.store("dead").arrivals(source_queue="work", count_max=100))
            assert not arrivals, "arrivals are remembered for ever"
        finally:
            self._patch.stop()
            self.real.close()

    # --- what must be true ------------------------------------------------------------------------------------

    @invariant()
    def every_letter_is_in_one_place(self) -> None:
        if not self.alive and not self.finished:
            return
        work, dead = self._look("work"), self._look("dead")
        if not work.loaded or not dead.loaded:
            return  # a store that could not be read since the start shows nothing
        for token, source_id in self.alive.items():
            assert token in work.dying or token in dead.items, f"{token!r} is lost"
            assert token not in work.items
            if token in dead.items:
                item = dead.items[token][0]
                assert (item.source_id, item.source_queue) == (source_id, "work")
        again = self.finished.keys() & dead.items.keys()
        assert not again, f"{again} were finished and came back"
        sources = [item.source_id for item, _, _ in dead.items.values()]
        assert len(sources) == len(set(sources))

    def _look(self, name: str) -> Seen:
        return self.real.run(look(self.real, Queue(name, 0, 0, 0, 0, "", self.partitions)))

    def _is_settled(self) -> bool:
        healthy = self.real.is_healthy("work") and self.real.is_healthy("dead")
        return healthy and not self._look("work").dying

    # --- what happens -----------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 3), how=st.sampled_from(["retry", "dead", "run out"]), lost=st.booleans())
    @precondition(lambda self: self.real.is_healthy("work"))
    def items_die(self, count: int, how: str, lost: bool) -> None:
        items = []
        for _ in range(count):
            self._count += 1
            items.append(NewItem(payload=b"%d" % self._count))
        if isinstance(self.real.attempt(self.real.queues.queue_produce("work", items)), HoldfastError):
            return  # a fault that was meant for the mover
        reply: Any = self.real.attempt(
            self.real.queues.queue_lease("work", batch_size=count, request_timeout="10ms"), within_s=0.01
        )
        if isinstance(reply, HoldfastError):
            return
        tokens = {item.id: item.payload for item in reply.items}
        if lost:
            self.real.faults.arm("after", "work")
        if how == "run out":
            self.real.advance(61.0)
        else:
            retried = [RetryItem(id=item_id, dead=how == "dead") for item_id in tokens]
            self.real.attempt(self.real.queues.queue_retry("work", retried, partition=reply.partition))
        dying = self._look("work").dying.keys() | self._look("dead").items.keys()
        self.alive |= {token: item_id for item_id, token in tokens.items() if token in dying}

    @rule(fault=st.sampled_from(["", "", "before", "after"]), name=st.sampled_from(["work", "dead"]))
    @precondition(lambda self: self.waiting)
    def the_mover_makes_a_commit(self, fault: Any, name: str) -> None:
        if fault:
            self.real.faults.arm(fault, name, STEPS)
        self.waiting.pop(0).set()
        self.real.advance(0.0)

    @rule(how=st.sampled_from(["complete", "complete", "delete", "retry", "clear"]))
    @precondition(lambda self: self.real.is_healthy("dead") and self.real.was_loaded("work"))
    def somebody_works_on_a_copy(self, how: str) -> None:
        reply: Any = self.real.attempt(
            self.real.queues.queue_lease("dead", batch_size=2, request_timeout="10ms"), within_s=0.01
        )
        if isinstance(reply, HoldfastError):
            assert isinstance(reply, NothingToLease)
            return
        ids = [item.id for item in reply.items]
        queues, partition = self.real.queues, reply.partition
        match how:
            case "complete":
                self.real.attempt(queues.queue_complete("dead", ids, partition=partition))
            case "delete":
                self.real.attempt(queues.storage_items_delete("dead", ids, partition=partition))
            case "retry":
                self.real.attempt(queues.queue_retry("dead", ids, partition=partition))
            case _:
                self.real.attempt(queues.queue_clear("dead", queue=True, destructive=True))
        if how == "retry":
            return
        left = self._look("dead").items
        had = [item.payload for item in reply.items] if how != "clear" else list(self.alive)
        gone = {token for token in had if token in self.alive and token not in left and self._has_arrived(token)}
        for token in gone:
            self.finished[token] = self.alive.pop(token)

    def _has_arrived(self, token: bytes) -> bool:
        """Not on its way any more: what was finished is the letter itself, and not a copy that came before it."""
        work = self._look("work")
        if token not in work.dying:
            return work.loaded
        return self.alive[token] in self.real.run(self.real.store("dead").arrivals(source_queue="work", count_max=1000))

    @rule()
    @precondition(lambda self: self.real.is_healthy("dead"))
    def somebody_imports_a_letter_that_is_on_its_way(self) -> None:
        """A backup of the dead queue is read back while the mover is under way: the same letter, once."""
        for token, source_id in list(self.alive.items())[:1]:
            item = ImportedItem(payload=token, source_id=source_id, source_queue="work")
            self.real.attempt(self.real.queues.storage_items_import("dead", [item]))

    @rule()
    def the_process_dies(self) -> None:
        self.waiting.clear()
        self.real.faults.down.clear()
        self.is_starting = True
        self.real.crash()
        self.is_starting = False

    @rule()
    def an_orderly_restart(self) -> None:
        self._let_go()
        self.real.restart()
        self.is_open = False

    def _let_go(self) -> None:
        self.is_open = True
        for turn in self.waiting:
            turn.set()
        self.waiting.clear()

    @rule(name=st.sampled_from(["work", "dead"]))
    def a_store_goes_down(self, name: str) -> None:
        self.real.faults.down.add(name)

    @rule(seconds=st.sampled_from([0.2, 31.0]))
    def the_stores_are_back(self, seconds: float) -> None:
        self.real.faults.down.clear()
        self.real.advance(seconds)


class MemoryMoves(MoveMachine):
    kind = "memory"


class SqliteMoves(MoveMachine):
    kind = "sqlite"


def test_a_death_in_memory_ends_in_one_place() -> None:
    run_state_machine_as_test(MemoryMoves, settings=settings_for(examples=100))


def test_a_death_in_sqlite_ends_in_one_place() -> None:
    run_state_machine_as_test(SqliteMoves, settings=settings_for(examples=40))
