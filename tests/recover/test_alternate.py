"""An alternate exchange takes what no binding does: for a recovery that is as bad as nowhere, and must be seen."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.recover.dead_letter_queue import DeadLetterQueue, letter, noted, summary
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

OWN = noted("shop", "old.key")


@pytest.fixture(params=["argument", "policy"])
async def alternate_dlq(dlq: DeadLetterQueue, request: pytest.FixtureRequest) -> DeadLetterQueue:
    """An exchange with one binding, and an alternate exchange with a queue for all that no binding takes."""
    await dlq.admin.exchange("unrouted", "fanout")
    await dlq.admin.queue("unrouted")
    await dlq.admin.bind("unrouted", "unrouted", "")
    alternate = {"alternate-exchange": "unrouted"}
    if request.param == "argument":
        await dlq.admin.exchange("shop", "topic", **alternate)
    else:
        await dlq.admin.exchange("shop", "topic")
        vhost = quote(dlq.admin.vhost, safe="")
        policy = {"pattern": "^shop$", "definition": alternate, "apply-to": "exchanges"}
        dlq.admin.node.api("PUT", f"/policies/{vhost}/net", policy)
        shown = f"/exchanges/{vhost}/shop"
        await eventually(lambda: dlq.admin.node.api("GET", shown).json().get("policy") == "net", timeout_s=30.0)
    await dlq.admin.bind("collection.scan", "shop", "good.key")
    dlq.routes.write_text("exchange = 'shop'\n[routes]\nCollectionScan = 'good.key'\nOld = 'old.key'\n")
    return dlq


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
async def test_such_a_route_is_refused_before_the_start(alternate_dlq: DeadLetterQueue, more: tuple[str, ...]) -> None:
    await alternate_dlq.fill(letter(n, kind="Old") for n in range(5))
    ended = await alternate_dlq.recover("--management", alternate_dlq.admin.node.management_url, *more)
    assert ended.code == 1
    assert "only the alternate exchange 'unrouted' takes it" in ended.stderr
    assert "nothing was taken" in ended.stderr
    await alternate_dlq.check(places=("unrouted",))


@pytest.mark.parametrize("dry", [False, True])
async def test_a_letter_that_only_it_would_take_is_kept(alternate_dlq: DeadLetterQueue, dry: bool) -> None:
    await alternate_dlq.fill(letter(n, kind=None if n % 2 else "CollectionScan", told=OWN) for n in range(20))
    alternate_dlq.routes.write_text("exchange = 'shop'\n[routes]\nCollectionScan = 'good.key'\n")
    ended = await alternate_dlq.recover(
        "--management", alternate_dlq.admin.node.management_url, *(["--dry-run"] if dry else [])
    )
    told = summary(ended)
    assert ended.code == 3
    assert (told["recovered"], told["failed"], told["remaining"]) == ((0, 10, 20) if dry else (10, 10, 10))
    [reason] = told["reasons"]
    assert reason == "unroutable: exchange 'shop', key 'old.key': only the alternate exchange 'unrouted' takes it"
    assert told["failed_by_queue"] == {"old.key": 10}
    assert await alternate_dlq.admin.count("unrouted") == 0
    await alternate_dlq.check(places=("collection.scan", "unrouted"))


async def test_who_goes_on_keeps_them(alternate_dlq: DeadLetterQueue) -> None:
    await alternate_dlq.fill(letter(n, kind="Old") for n in range(5))
    ended = await alternate_dlq.recover("--management", alternate_dlq.admin.node.management_url, "--keep-unroutable")
    assert (ended.code, summary(ended)["failed"]) == (3, 5)
    assert await alternate_dlq.admin.count("unrouted") == 0
    await alternate_dlq.check(places=("unrouted",))


async def test_without_the_management_api_it_is_said_that_nobody_knows(alternate_dlq: DeadLetterQueue) -> None:
    await alternate_dlq.fill([letter(1)])
    ended = await alternate_dlq.recover("--management", "http://127.0.0.1:1")
    assert ended.code == 0, ended
    assert "whether the keys of 'shop' reach a queue, or an alternate exchange only, cannot be known" in ended.stderr
