"""The long run of custody: many kills of capture and redrive at random crash points, on SQLite or PostgreSQL."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from typing import Any

from holdfast.core.selection import Selection
from holdfast.settings import load_settings
from holdfast.wiring import open_vault_app
from tests.support.amqp import Admin, headers_of
from tests.support.rabbitmq import Node
from tests.vault.letters import DLQ, MAIN, dead
from tests.vault.worker import work

POINTS = {
    "capture": ("capture.before_put", "vault.after_put", "capture.before_ack", "capture.after_ack"),
    "redrive": ("vault.after_lease", "redrive.before_publish", "redrive.after_confirm", "vault.after_settle"),
}
LETTERS_A_ROUND = 40
#: So many runs of each kind in a round may be killed; then one has to come to its end.
KILLED_RUNS_MAX = 6
RUNS_MAX = 50
#: Every so often a run is killed at any moment instead of at a crash point.
ANY_MOMENT = 0.3
ANY_MOMENT_S_MAX = 0.8


async def random_kills(*, kills: int, seed: int, vault: str = "") -> dict[str, Any]:
    """Rounds of capture and redrive with kills in between, until there were enough; then everything is counted."""
    chance = random.Random(seed)
    with Node("3.10") as node, tempfile.TemporaryDirectory(prefix="holdfast-soak-") as folder:
        async with Admin.open(node, "custody-soak") as admin:
            await admin.queue(DLQ)
            await admin.queue(MAIN)
            env = {
                "HOLDFAST_VAULT": vault or f"sqlite:///{folder}/data",
                "HOLDFAST_DATA_FOLDER": folder,
                "HOLDFAST_BROKER": node.url("custody-soak"),
                "HOLDFAST_DEAD_QUEUES": DLQ,
            }
            return await _rounds(admin, env, chance, kills)


async def _rounds(admin: Admin, env: dict[str, str], chance: random.Random, kills: int) -> dict[str, Any]:
    sent: Counter[bytes] = Counter()
    killed: Counter[str] = Counter()
    arrived: dict[str, bytes] = {}  # by the id that all copies of one have
    arrived_count = ages = 0
    while killed.total() < kills:
        # A few equal twins. Most are none: a copy that a kill has made hides the loss of its twin, and of nothing else.
        batch = [f"{ages}-{chance.randrange(4 * LETTERS_A_ROUND)}".encode() for _ in range(LETTERS_A_ROUND)]
        ages += 1
        await admin.publish([dead(body) for body in batch])
        sent.update(batch)
        for kind in POINTS:
            for run in range(RUNS_MAX):
                # No lease outlives its process.
                env["HOLDFAST_CLOCK_OFFSET_S"] = str(1000 * (killed.total() + ages + run))
                at, after_s = _end(kind, chance) if run < KILLED_RUNS_MAX else ("", 0.0)
                if not await work(kind, {**env, "TEST_ROUND": str(ages)}, at, kill_after_s=after_s):
                    break
                killed[at.partition(":")[0] or f"{kind} at any moment"] += 1
        for delivery in await admin.drain(MAIN, await admin.count(MAIN)):
            arrived[str(headers_of(delivery).get("x-redrive-id", ""))] = delivery.body
            arrived_count += 1
    async with open_vault_app(load_settings(environment=env, serving=False), None) as vault_app:
        balanced = all(row.agrees for row in await vault_app.vault.ledger.balance())
        chain = (await vault_app.vault.seals.verify()).why
        stored = (await vault_app.vault.letters.count(Selection())).count
    return {
        "kills": killed.total(),
        "at": dict(sorted(killed.items())),
        "messages": sent.total(),
        "lost": (sent - Counter(arrived.values())).total(),
        "duplicates": arrived_count - len(arrived),
        "stored_twice": stored - sent.total(),
        "balanced": balanced,
        "chain": chain or "holds",
    }


def _end(kind: str, chance: random.Random) -> tuple[str, float]:
    """Where or when a run is killed."""
    if chance.random() < ANY_MOMENT:
        return "", chance.uniform(0.05, ANY_MOMENT_S_MAX)
    return f"{chance.choice(POINTS[kind])}:1", 0.0
