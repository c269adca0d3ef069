"""The whole service against its books, on every store."""

from __future__ import annotations

from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import ServiceMachine
from tests.model.profile import settings_for


class MemoryMachine(ServiceMachine):
    kind = "memory"


class SqliteMachine(ServiceMachine):
    kind = "sqlite"


def test_the_memory_store_keeps_the_books() -> None:
    run_state_machine_as_test(MemoryMachine, settings=settings_for(examples=150))


def test_the_sqlite_store_keeps_the_books() -> None:
    run_state_machine_as_test(SqliteMachine, settings=settings_for(examples=60))
