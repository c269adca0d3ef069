"""A virtual host of RabbitMQ, filled and looked at by its management API: nothing of Holdfast's client is needed."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx2
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

    def __init__(self, node: Node, vhost: str, http: httpx2.Client) -> None:
        self.node = node
        self.vhost = vhost
        self._path = quote(vhost, safe="")
        self._http = http

    @property
    def url(self) -> str:
        """Its address."""
        return self.node.url(self.vhost)

    def queue(self, name: str, **arguments: int | str) -> None:
        """A durable classic queue."""
        self._api("PUT", f"/queues/{self._path}/{quote(name, safe='')}", {"durable": True, "arguments": arguments})

    def exchange(self, name: str, *queues: str) -> None:
        """A durable direct exchange; each queue is bound by its own name."""
        self._api("PUT", f"/exchanges/{self._path}/{quote(name, safe='')}", {"type": "direct", "durable": True})
        for queue in queues:
            path = f"/bindings/{self._path}/e/{quote(name, safe='')}/q/{quote(queue, safe='')}"
            self._api("POST", path, {"routing_key": queue})

    def publish(self, queue: str, body: bytes, properties: Mapping[str, Any]) -> None:
        """Into a queue."""
        message = {
            "properties": {"delivery_mode": 2, **properties},
            "routing_key": queue,
            "payload": base64.b64encode(body).decode(),
            "payload_encoding": "base64",
        }
        answer = self._api("POST", f"/exchanges/{self._path}/amq.default/publish", message).json()
        assert answer["routed"], f"there is no queue '{queue}'"

    def drain(self, queue: str) -> list[Found]:
        """Everything that is in it, taken out."""
        return self._get(queue, "ack_requeue_false")

    def give_back(self, queue: str) -> int:
        """Look at everything and give it back: from now on it is marked as redelivered. How many there are."""
        return len(self._get(queue, "reject_requeue_true"))

    def _api(self, method: str, path: str, body: object) -> httpx2.Response:
        return self._http.request(method, path, json=body).raise_for_status()

    def _get(self, queue: str, ackmode: str) -> list[Found]:
        request = {"count": GET_COUNT_MAX, "ackmode": ackmode, "encoding": "base64"}
        found = self._api("POST", f"/queues/{self._path}/{quote(queue, safe='')}/get", request).json()
        return [Found(base64.b64decode(one["payload"]), dict(one["properties"])) for one in found]


@contextmanager
def virtual_host(node: Node, name: str) -> Iterator[Broker]:
    """A new, empty one; it is deleted at the end."""
    node.create_vhost(name)
    with httpx2.Client(base_url=f"{node.management_url}/api", timeout=30) as http:
        try:
            yield Broker(node, name, http)
        finally:
            node.delete_vhost(name)
