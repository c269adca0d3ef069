"""A process that captures or redrives and can be killed: `python -m tests.vault.worker capture|redrive`."""

from __future__ import annotations

import asyncio
import os
import sys

from holdfast.core.ledger import LedgerAct
from holdfast.core.plan import PlanOptions, RedriveState
from holdfast.core.selection import Selection
from holdfast.core.states import LetterState
from holdfast.proof.process import python_argv
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import load_settings
from holdfast.wiring import open_vault_app
from tests.support.forking import ended_or_killed, forked_process
from tests.vault.letters import ADMIN, DLQ

ACT = LedgerAct(actor="worker", action="redrives.start")


async def work(kind: str, environment: dict[str, str], crash_at: str = "", *, kill_after_s: float = 0.0) -> int:
    """Run one to its end, which is its own or a SIGKILL: at a crash point, or so long after it has begun to work."""
    env = {**environment, "HOLDFAST_CRASH_AT": crash_at}
    async with forked_process(python_argv("tests.vault.worker", kind), env=env) as child:
        if kill_after_s:
            await child.wait_line("at work")
        code = await ended_or_killed(child, kill_after_s) if kill_after_s else await child.wait()
        assert code in (0, -9), child.stderr.tail
        return code


async def redrive(vault_app: VaultApp) -> None:
    """Go on with what was begun, or begin with everything that is captured."""
    found = await vault_app.vault.redrives.page(before=2**62, count_max=10)
    if not any(task.state is RedriveState.RUNNING for task in found):
        wish = PlanOptions(selection=Selection(queue=DLQ, state=LetterState.CAPTURED))
        plan = await vault_app.planner.plan(wish, ADMIN)
        if plan.count:
            operation = os.environ.get("TEST_ROUND", "once")
            await vault_app.planner.execute(plan.hash, ADMIN, ACT, operation=operation)
    for task in await vault_app.vault.redrives.page(before=2**62, count_max=10):
        if task.state is RedriveState.RUNNING:
            await vault_app.redrives.run(task.id)


async def main(kind: str) -> None:
    """One piece of work, by the settings of the environment."""
    print("at work", flush=True)  # noqa: T201
    async with open_vault_app(load_settings(serving=False), None) as vault_app:
        await (vault_app.custody.capture(DLQ, ADMIN, idle_s=0.3) if kind == "capture" else redrive(vault_app))


if __name__ == "__main__" and os.environ.get("HOLDFAST_BROKER"):
    asyncio.run(main(sys.argv[1]))
