"""The vault against its model, on every store: nothing lost, states as the table says, balance and chain hold."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.model.profile import settings_for
from tests.vault.machine import VaultMachine


class MemoryVault(VaultMachine):
    kind = "memory"


class SqliteVault(VaultMachine):
    kind = "sqlite"


class PostgresVault(VaultMachine):
    kind = "postgres"


def test_a_vault_in_memory_is_as_the_model_says() -> None:
    run_state_machine_as_test(MemoryVault, settings=settings_for(examples=25))


def test_a_vault_in_sqlite_is_as_the_model_says() -> None:
    run_state_machine_as_test(SqliteVault, settings=settings_for(examples=8))


@pytest.mark.postgres
def test_a_vault_in_postgresql_is_as_the_model_says(postgres_url: str) -> None:
    PostgresVault.url = postgres_url
    run_state_machine_as_test(PostgresVault, settings=settings_for(examples=3))
