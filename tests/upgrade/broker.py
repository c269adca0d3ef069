"""A virtual host of RabbitMQ, filled and looked at by its management API: nothing of Holdfast's client is needed."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from tests.support.rabbitmq import Node

GET_COUNT_MAX = 1_000


class Found(Struct, frozen=True):
    """A message as it lay in its queue."""

    body: bytes
    properties: dict[str, Any]

    @property
    def headers(self) -> dict[str, Any]:
        """Its headers; none is an empty table."""
        headers: dict[str, Any] = self.properties.get("headers") or {}
        return headers

    @property
    def id(self) -> str:
        """Its message id."""
        return str(self.properties.get("message_id", ""))


class Broker:
    """One virtual host."""

    def __init__(self, node: Node, vhost: str) -> None:
        self.node = node
        self.vhost = vhost
        self.url = node.url(vhost)

    def queue(self, name: str) -> None:
        """A durable classic queue."""
        self._api("PUT", "queues", name, body={"durable": True})

    def exchange(self, name: str, *queues: str) -> None:
        """A durable direct exchange; each queue is bound by its own name."""
        self._api("PUT", "exchanges", name, body={"type": "direct", "durable": True})
        for queue in queues:
            self._api("POST", "bindings", "e", name, "q", queue, body={"routing_key": queue})

    def publish(self, queue: str, body: bytes, properties: Mapping[str, Any]) -> None:
        """Into a queue."""
        message = {
            "properties": {"delivery_mode": 2, **properties},
            "routing_key": queue,
            "payload": base64.b64encode(body).decode(),
            "payload_encoding": "base64",
        }
        assert self._api("POST", "exchanges", "amq.default", "publish", body=message)["routed"], f"no queue '{queue}'"

    def drain(self, queue: str) -> list[Found]:
        """Everything that is in it, taken out."""
        return self._get(queue, "ack_requeue_false")

    def give_back(self, queue: str) -> int:
        """Look at everything and give it back: from now on it is marked as redelivered. How many there are."""
        return len(self._get(queue, "reject_requeue_true"))

    def _get(self, queue: str, ackmode: str) -> list[Found]:
        request = {"count": GET_COUNT_MAX, "ackmode": ackmode, "encoding": "base64"}
        found = self._api("POST", "queues", queue, "get", body=request)
        return [Found(base64.b64decode(one["payload"]), dict(one["properties"])) for one in found]

    def _api(self, method: str, kind: str, *path: str, body: object) -> Any:
        names = "/".join(quote(name, safe="") for name in (self.vhost, *path))
        answer = self.node.api(method, f"/{kind}/{names}", body)
        return answer.json() if answer.content else None
