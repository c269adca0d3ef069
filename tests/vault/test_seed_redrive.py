"""The re-drive of seed 002, over HTTP: letters that its consumers parked at a first failure tell nothing of a death."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.settings import Secret
from tests.faces.api.conftest import open_installation
from tests.support.amqp import Admin, headers_of, outgoing
from tests.support.rabbitmq import Node, vhost_name

pytestmark = pytest.mark.rabbitmq
MAIN, DLQ = "q.validator", "q.validator.dlq"


@pytest.fixture
async def admin(request: pytest.FixtureRequest, node: Node) -> AsyncIterator[Admin]:
    async with Admin.open(node, vhost_name(request.node.name)) as admin:
        await admin.queue(MAIN)
        await admin.queue(DLQ)
        yield admin


async def lay_out(admin: Admin) -> None:
    """As the seed's definitions do."""
    back: dict[str, int | str] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": MAIN}
    await admin.queue(f"{MAIN}.retry", **{"x-message-ttl": 3_600_000}, **back)
    for exchange, queue, key in (("retry", f"{MAIN}.retry", "retry"), ("dlq", DLQ, "parking")):
        await admin.exchange(f"{exchange}.{MAIN}")
        await admin.bind(queue, f"{exchange}.{MAIN}", key)


def settings_on(admin: Admin, *, has_management: bool) -> dict[str, object]:
    management = Secret(admin.node.management_url) if has_management else None
    return {"broker": Secret(admin.url), "management": management, "dead_queues": DLQ}


async def redriven(
    admin: Admin, folder: Path, *, has_management: bool = True, **body: object
) -> tuple[int, dict[str, Any]]:
    settings = settings_on(admin, has_management=has_management)
    async with open_installation(folder, **settings) as installation, installation.client() as client:
        answer = await client.post(f"/admin/dlq/queues/{DLQ}/re-drive", json={"limit": 10, **body})
        return answer.status_code, dict(answer.json())


@pytest.mark.parametrize("has_management", [True, False])
@pytest.mark.parametrize("is_laid_out", [True, False], ids=["layout", "names"])
async def test_letters_without_a_story_go_to_the_source_that_the_list_shows(
    admin: Admin, tmp_path: Path, is_laid_out: bool, has_management: bool
) -> None:
    if is_laid_out:
        await lay_out(admin)
    await admin.publish([outgoing(DLQ, b"%d" % number) for number in range(3)])
    code, told = await redriven(admin, tmp_path, has_management=has_management)
    assert (code, told["redriven"], told["kept"], told["kept_in"]) == (200, 3, 0, "")
    assert [one.body for one in await admin.drain(MAIN, 3)] == [b"0", b"1", b"2"]


async def test_the_seed_sends_them_through_the_wait_queue(admin: Admin, tmp_path: Path) -> None:
    await lay_out(admin)
    await admin.publish([outgoing(DLQ, b"x")])
    code, told = await redriven(admin, tmp_path, via="retry")
    assert (code, told["redriven"], await admin.count(MAIN)) == (200, 1, 0)
    [waiting] = await admin.look(f"{MAIN}.retry")
    assert headers_of(waiting)["x-redriven-from"] == DLQ


async def test_what_cannot_go_has_its_place_in_the_answer(admin: Admin, tmp_path: Path) -> None:
    """One was parked into another dead-letter queue, and somebody moved it here: no list says where it belongs."""
    moved = {"x-original-queue": "q.thumbnail", "x-original-for": "q.thumbnail.dlq"}
    await admin.publish([outgoing(DLQ, b"moved", headers=moved), outgoing(DLQ, b"own")])
    settings = settings_on(admin, has_management=True)
    async with open_installation(tmp_path, **settings) as installation, installation.client() as client:
        told = (await client.post(f"/admin/dlq/queues/{DLQ}/re-drive", json={"limit": 10})).json()
        assert (told["redriven"], told["kept"]) == (1, 1)
        assert list(told["reasons"]) == ["it was parked into 'q.thumbnail.dlq', and nothing says how it came here"]
        found = (await client.get(told["kept_in"])).json()["letters"]
        assert [one["id"] for one in found] == told["kept_ids"]
        assert (await client.get(f"/admin/letters/{told['kept_ids'][0]}/body")).content == b"moved"
    assert await admin.count(DLQ) == 0


@pytest.mark.parametrize("via", ["wait", 1])
async def test_another_way_is_refused(admin: Admin, tmp_path: Path, via: object) -> None:
    code, _ = await redriven(admin, tmp_path, via=via)
    assert code == 400
