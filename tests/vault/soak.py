"""The long run of custody: many kills of capture and redrive at random crash points, on SQLite or PostgreSQL."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from holdfast.core.letter_selection import Selection
from holdfast.engines.rabbitmq.wire import properties
from holdfast.proof.process import child_process, python_argv
from holdfast.settings import load_settings
from holdfast.wiring_custody import open_office
from tests.engines.rabbitmq.admin import Admin
from tests.support.rabbitmq import running_node
from tests.vault.brokers import DLQ, MAIN, dead, send

ROOT = Path(__file__).parents[2]
POINTS = {
    "capture": ("capture.before_put", "vault.after_put", "capture.before_ack", "capture.after_ack"),
    "redrive": ("vault.after_lease", "redrive.before_publish", "redrive.after_confirm", "vault.after_settle"),
}
LETTERS_A_ROUND = 60
RUNS_MAX = 50


async def random_kills(*, kills: int, seed: int, vault: str = "") -> dict[str, Any]:
    """Rounds of capture and redrive with kills in between, until there were enough; then everything is counted."""
    chance = random.Random(seed)
    with running_node("3.10") as node, tempfile.TemporaryDirectory(prefix="holdfast-soak-") as folder:
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
    arrived: Counter[bytes] = Counter()
    killed = duplicates = ages = 0
    seen: set[str] = set()
    while killed < kills:
        batch = [f"{ages}-{chance.randrange(LETTERS_A_ROUND)}".encode() for _ in range(LETTERS_A_ROUND)]  # with twins
        ages += 1
        await send(admin, [dead(body) for body in batch])
        sent.update(batch)
        for kind in ("capture", "redrive"):
            for run in range(RUNS_MAX):
                env["HOLDFAST_CLOCK_OFFSET_S"] = str(1000 * (killed + ages + run))  # no lease outlives its process
                crash = f"{chance.choice(POINTS[kind])}:{chance.randint(1, 3)}" if run < 3 else ""
                code = await _worked(kind, {**env, "TEST_ROUND": str(ages)}, crash)
                killed += code == -9
                if code == 0:
                    break
        for delivery in await admin.drain(MAIN, await admin.count(MAIN)):
            headers = properties.decode(delivery.properties)["headers"]
            redrive_id = str(headers["x-redrive-id"]) if isinstance(headers, dict) else ""
            if redrive_id in seen:
                duplicates += 1
            else:
                seen.add(redrive_id)
                arrived[delivery.body] += 1
    async with open_office(load_settings(environment=env, serving=False), None) as office:
        balanced = all(row.agrees for row in await office.ledgers.balance())
        chain = (await office.ledgers.verify()).why
        stored = (await office.vault.letters.count(Selection())).count
    lost = sum((sent - arrived).values())
    return {
        "kills": killed,
        "messages": sent.total(),
        "lost": lost,
        "duplicates": duplicates,
        "stored_twice": stored - sent.total(),
        "balanced": balanced,
        "chain": chain or "holds",
    }


async def _worked(kind: str, env: dict[str, str], crash: str) -> int:
    async with child_process(
        python_argv("tests.vault.worker", kind), env={**env, "HOLDFAST_CRASH_AT": crash}, cwd=ROOT
    ) as child:
        code = await child.wait()
        if code not in (0, -9):
            raise AssertionError(child.stderr.tail)
        return code
