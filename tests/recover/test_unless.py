"""Work that is given up when an event comes first."""

from __future__ import annotations

import asyncio
import gc

from holdfast.services.recover.limits import unless


async def test_what_fails_while_it_is_given_up_is_printed_by_nobody() -> None:
    printed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: printed.append(context))
    event = asyncio.Event()

    async def work() -> None:
        event.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("the broker is gone as well") from None

    assert not await unless(event, work())
    gc.collect()
    assert not printed
