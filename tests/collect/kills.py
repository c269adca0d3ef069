"""Random kills of the collector's process; the long form of the crash points, for the soak."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from pathlib import Path

from msgspec import Struct

from holdfast.proof.process import Child, ChildFailed, python_argv
from tests.collect.invariants import check_folder
from tests.collect.shared import BUCKET, Bucket, Place, check_place, producing, rows_of
from tests.collect.worker import SHAPE
from tests.support.amqp import Admin

ROOT = Path(__file__).parents[2]
LIFE_S_MAX = 1.6
WORK_S_MAX = 0.3
START_S_MAX = 60
LOOK_S = 0.005
AT_WORK_SHARE = 0.5
KILLS_PER_RESULT_MAX = 12


class Tally(Struct):
    """What a soak of the collector counted."""

    kills: int = 0
    messages: int = 0
    lost: int = 0
    duplicates: int = 0
    results: int = 0


async def lives(env: dict[str, str], argv: list[str], folder: Path, chance: random.Random, kills_max: int) -> int:
    """Kill the process at random moments until it ends by itself or was killed often enough; returns the kills.

    One kill in two comes soon after it has begun to upload: on a busy machine it would else hardly ever get so far.
    """
    for kills in range(kills_max + 1):
        before = size_of(folder / "uploads")
        child = await Child.start(argv, env={"HOLDFAST_CRASH_AT": "", **env}, cwd=ROOT)
        try:
            if kills == kills_max:
                code = await child.wait(timeout_s=60)
            else:
                if chance.random() < AT_WORK_SHARE:
                    await until_at_work(child, folder / "uploads", before)
                    life_s = chance.uniform(0.0, WORK_S_MAX)
                else:
                    life_s = chance.uniform(0.2, LIFE_S_MAX)
                try:
                    code = await child.wait(timeout_s=life_s)
                except ChildFailed:
                    code = await child.kill()
            if code == 0:
                return kills
            assert code == -9, child.stderr.tail
        finally:
            await child.close()
    raise AssertionError("it did not end")


async def until_at_work(child: Child, uploads: Path, before: int) -> None:
    """Until it has uploaded something, or has ended because nothing was left to upload."""
    async with asyncio.timeout(START_S_MAX):
        while size_of(uploads) == before:
            try:
                await child.wait(timeout_s=LOOK_S)
            except ChildFailed:
                continue
            return


def size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


async def embedded_kills(*, kills: int, seed: int) -> Tally:
    """SQLite + embedded queue + folder: results one after another until so many kills are reached."""
    chance, tally = random.Random(seed), Tally()
    while tally.kills < kills:
        folder = Path(tempfile.mkdtemp(prefix="holdfast-soak-"))
        try:
            argv = python_argv("tests.collect.worker", str(folder))
            killed = await lives({}, argv, folder, chance, chance.randint(1, KILLS_PER_RESULT_MAX))
            tally.duplicates += await check_folder(folder, kills=killed)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        tally.kills += killed
        tally.results += 1
        tally.messages += sum(SHAPE.values()) + len(SHAPE)
    return tally


async def shared_kills(url: str, admin: Admin, bucket: Bucket, *, kills: int, seed: int) -> Tally:
    """PostgreSQL + RabbitMQ + S3."""
    chance, tally = random.Random(seed), Tally()
    total = sum(SHAPE.values())
    async with producing(admin):
        while tally.kills < kills:
            name = f"soak-{tally.results}"
            place = Place(url, admin.node.url(admin.vhost), f"s3://{BUCKET}/{name}")
            with tempfile.TemporaryDirectory(prefix="holdfast-soak-") as folder:
                env = {**place.env, **bucket.env, "TEST_FOLDER": folder, "TEST_TRANSACTION": name}
                argv = python_argv("tests.collect.shared_worker")
                killed = await lives(env, argv, Path(folder), chance, chance.randint(1, KILLS_PER_RESULT_MAX))
                await check_place(place, admin, transaction=name)
                assert rows_of(url, name) == total
                noted = (Path(folder) / "uploads").read_text().splitlines()
            again = len([line for line in noted if "manifest-" not in line]) - total
            assert again <= 4 * killed, f"{again} re-uploads after {killed} kills"
            tally.duplicates += again
            tally.kills += killed
            tally.results += 1
            tally.messages += total + len(SHAPE)
    return tally
