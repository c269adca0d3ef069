"""The machines: the whole service against its model, and the three commits of a death.

PostgreSQL's machine has few examples here, because one takes a second or two there; the soak has more.
"""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.model.installation import PostgresBackend
from tests.model.machine import ServiceMachine
from tests.model.moves import MoveMachine
from tests.model.profile import settings_for

pytestmark = pytest.mark.slow


class MemoryMachine(ServiceMachine):
    kind = "memory"


class SqliteMachine(ServiceMachine):
    kind = "sqlite"


class PostgresMachine(ServiceMachine):
    kind = "postgres"


class MemoryMoves(MoveMachine):
    kind = "memory"


class SqliteMoves(MoveMachine):
    kind = "sqlite"


def test_a_death_in_memory_ends_in_one_place() -> None:
    run_state_machine_as_test(MemoryMoves, settings=settings_for(examples=100))


def test_a_death_in_sqlite_ends_in_one_place() -> None:
    run_state_machine_as_test(SqliteMoves, settings=settings_for(examples=40))


def test_the_memory_store_is_as_the_model_says() -> None:
    run_state_machine_as_test(MemoryMachine, settings=settings_for(examples=150))


def test_the_sqlite_store_is_as_the_model_says() -> None:
    run_state_machine_as_test(SqliteMachine, settings=settings_for(examples=60))


def test_the_postgres_store_is_as_the_model_says(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PostgresBackend, "url", postgres_url)
    run_state_machine_as_test(PostgresMachine, settings=settings_for(examples=5, steps=25))


def test_a_death_in_postgres_whose_answer_was_lost_can_be_leased_at_once(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PostgresBackend, "url", postgres_url)
    machine = PostgresMachine()
    try:
        machine.begin(partitions=1, max_attempts=0)
        machine.lease("dead", 2, 1.0)  # its counts are known, and nothing is hinted any more
        machine.settle("work", 0, "dead", 0, 0, "after")
        machine.the_model_is_right()
        machine.lease("dead", 1, 0.01)
    finally:
        machine.teardown()
