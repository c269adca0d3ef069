"""A question about the queue that is not answered in time, or answered by a no, though letters are in hand."""

from __future__ import annotations

import pytest

from holdfast.core.recovery import StoppedBy
from holdfast.engines.rabbitmq.channel import Channel
from holdfast.errors import BrokerRefused
from holdfast.ports.recovery import Depth
from holdfast.proof.proxy import Proxy
from tests.recover.inside import OneMoreFound, letters_of, run
from tests.recover.world import World, letter

pytestmark = pytest.mark.rabbitmq

COUNT = 20


class Unanswered(OneMoreFound):
    """The first time that somebody asks how many letters there are."""

    proxy: Proxy
    is_refused = False
    asked_count = 0

    async def depth(self) -> Depth:
        self.asked_count += 1
        if self.asked_count > 1:
            return await super().depth()
        if self.is_refused:
            raise BrokerRefused("the broker refused; 404 NOT_FOUND - home node is down", reply_code=404)
        self.proxy.pause("down")
        try:
            return await super().depth()
        finally:
            self.proxy.resume("down")


@pytest.mark.parametrize("is_refused", [False, True])
async def test_the_run_begins_anew_with_one_consumer(
    any_world: World, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was in hand comes again: had the first consumer stayed, it would hold all that until the end."""
    for question in (Channel.call, Channel.answer):
        assert question.__kwdefaults__ is not None
        monkeypatch.setitem(question.__kwdefaults__, "timeout_s", 1.0)
    world = any_world
    await world.fill(letter(n, kind="Strange" if n % 2 else "CollectionScan") for n in range(COUNT))
    async with Proxy("127.0.0.1", world.admin.node.port) as proxy:
        letters = letters_of(Unanswered, world, port=proxy.port)
        letters.proxy, letters.is_refused = proxy, is_refused
        told = await run(letters)
    assert (told.interruptions, told.stopped_by, told.failure) == (1, StoppedBy.EMPTY, "")
    assert (told.recovered, told.skipped, told.remaining) == (COUNT // 2, COUNT // 2, COUNT // 2)
    assert not [note for note in told.notes if "not come again" in note or "has not taken all acks" in note]
    await world.check(duplicates_max=told.possible_duplicates)
