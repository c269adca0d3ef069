"""What takes the delivery limit of a dead-letter queue away, for people: a sentence, and a command to be copied."""

from __future__ import annotations

import json
import re
import shlex

from holdfast.core.topology import Version
from holdfast.engines.rabbitmq.management import ManagedQueue, Management
from holdfast.errors import HoldfastError

#: Where nobody could say which policy the queue has: above those that people usually make.
PRIORITY_UNSEEN = 100


def cure(queue: str, vhost: str, version: Version, info: ManagedQueue | None, priority: int) -> str:
    """In lines; a command has the last one to itself."""
    if version < Version(4, 0):
        return "a queue without x-delivery-limit, or a policy without delivery-limit"
    own = info.arguments.get("x-delivery-limit") if info else None
    if isinstance(own, int) and own >= 0:
        return f"a queue that is declared without x-delivery-limit {own}, which no policy takes away"
    definition = {"delivery-limit": -1}
    if info is None:
        replaced = " (a queue has one policy: a policy of lower priority that the queue has is no longer in force)"
    elif info.policy:
        # Whatever else it sets for this queue would be gone with it.
        definition = {**info.effective_policy, **definition}
        replaced = f" (a queue has one policy: this one is in place of '{info.policy}', whose settings it keeps)"
    else:
        replaced = ""
    words = ["rabbitmqctl", "set_policy", "-p", vhost, "--priority", str(priority), "--apply-to", "queues"]
    words += [f"no-limit.{queue}", f"^{re.escape(queue)}$", json.dumps(definition)]
    return f"a policy{replaced}:\n{shlex.join(words)}"


async def priority_above(management: Management, info: ManagedQueue | None) -> int:
    """Of a policy that is in force instead of the one that the queue has."""
    if info is None or not info.policy:
        return 0
    try:
        policies = await management.policies(info.vhost)
    except HoldfastError:
        return PRIORITY_UNSEEN
    return next((one.priority + 1 for one in policies if one.name == info.policy), PRIORITY_UNSEEN)
