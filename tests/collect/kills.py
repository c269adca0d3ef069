"""Random kills of the collector's process; the long form of the crash points, for the soak."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from holdfast.proof.process import Child, child_process
from tests.collect.shared import check_embedded, check_shared, check_uploads, producing, shared_place
from tests.collect.worker import SHAPE, TOTAL, Place
from tests.support.amqp import Admin
from tests.support.eventually import eventually
from tests.support.forking import ROOT, ended_or_killed

LIFE_S_MAX = 1.6
WORK_S_MAX = 0.3
AT_WORK_SHARE = 0.5
KILLS_PER_RESULT_MAX = 12


async def lives(place: Place, chance: random.Random) -> int:
    """Kill the process at random moments until it ends by itself or was killed often enough; returns the kills.

    One kill in two comes soon after it has begun to upload: on a busy machine it would else hardly ever get so far.
    """
    kills_max = chance.randint(1, KILLS_PER_RESULT_MAX)
    uploads = Path(place.folder) / "uploads"
    uploads.touch()
    for kills in range(kills_max + 1):
        before = uploads.stat().st_size
        async with child_process(place.argv, env={"HOLDFAST_CRASH_AT": ""}, cwd=ROOT) as child:
            if kills == kills_max:
                code = await child.wait(timeout_s=60)
            elif chance.random() < AT_WORK_SHARE:
                await eventually(partial(is_at_work, child, uploads, before))
                code = await ended_or_killed(child, chance.uniform(0.0, WORK_S_MAX))
            else:
                code = await ended_or_killed(child, chance.uniform(0.2, LIFE_S_MAX))
            if code == 0:
                return kills
            assert code == -9, child.stderr.tail
    raise AssertionError("it did not end")


def is_at_work(child: Child, uploads: Path, before: int) -> bool:
    """Whether it has uploaded something, or has ended because nothing was left to upload."""
    return child.returncode is not None or uploads.stat().st_size > before


async def random_kills(kills: int, seed: int, *, url: str = "", admin: Admin | None = None) -> Counter[str]:
    """Results one after another until so many kills are reached: on PostgreSQL + RabbitMQ + S3 where they are given,
    else on SQLite + embedded queue + folder."""
    chance = random.Random(seed)
    tally = Counter(kills=0, messages=0, lost=0, duplicates=0, results=0)
    async with producing(admin) if admin else nullcontext():
        while tally["kills"] < kills:
            with tempfile.TemporaryDirectory(prefix="holdfast-soak-") as folder:
                name = f"soak-{tally['results']}"
                place = shared_place(url, admin, folder, name) if admin else Place.embedded(folder)
                killed = await lives(place, chance)
                await (check_shared(place, admin) if admin else check_embedded(place))
                again = check_uploads(place, killed)
            tally.update(kills=killed, messages=TOTAL + len(SHAPE), duplicates=again, results=1)
    return tally
