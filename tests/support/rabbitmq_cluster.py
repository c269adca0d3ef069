"""A private RabbitMQ cluster of three nodes, for tests in which a node dies, hangs or stays away.

```python
@pytest.mark.rabbitmq
async def test_…(rabbitmq_cluster: RabbitCluster) -> None:
    vhost = rabbitmq_cluster.create_vhost("test-…")
    rabbitmq_cluster.declare(vhost, "orders", home=0, quorum=True)
    app = holdfast.App(rabbitmq_cluster.url(vhost))    # all three hosts, tried in order
    rabbitmq_cluster.leader_of(vhost, "orders").kill()
```

The fixture is in `tests/conftest.py`: one cluster per run, whole again before each test that asks for it. Every node is
a `Node`, with its `kill`, `pause`, `stop` and `start`. `with RabbitCluster()` makes one of one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self
from urllib.parse import quote

from tests.support.rabbitmq import Node, required
from tests.support.servers import READY_TIMEOUT_S, wait_until

NODES_COUNT = 3
#: How long a node that is asked for its neighbours waits before it asks again: half a second by default.
FORMATION = """
cluster_formation.peer_discovery_backend = classic_config
{peers}
cluster_formation.discovery_retry_interval = 200
cluster_partition_handling = pause_minority
"""


def cluster_versions() -> list[str]:
    """Those that the cluster's tests run on: Debian's, and the newer ones where they are asked for."""
    return sorted({"3.10"} | required())


class RabbitCluster:
    """Three nodes that know one another."""

    def __init__(self, version: str = "3.10") -> None:
        self.version = version
        first = Node(version)
        self.nodes = [first, *(Node(version, epmd_of=first) for _ in range(NODES_COUNT - 1))]

    def __enter__(self) -> Self:
        """Start all nodes at once, and wait until they are a cluster."""
        names = enumerate((node.name for node in self.nodes), start=1)
        peers = "\n".join(f"cluster_formation.classic_config.nodes.{number} = {name}" for number, name in names)
        try:
            for node in self.nodes:
                node.configure(FORMATION.format(peers=peers))
            self.heal()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all nodes, by their process ids, and remove their data; the one with the name service last."""
        for node in reversed(self.nodes):
            node.close()

    def url(self, vhost: str = "/", *, first: int = 0, more: str = "") -> str:
        """The address with all hosts; they are tried in order, beginning with node `first`."""
        order = [*self.nodes[first:], *self.nodes[:first]]
        places = ",".join(f"127.0.0.1:{node.port}" for node in order)
        return f"amqp://guest:guest@{places}/{quote(vhost, safe='')}{more}"

    @property
    def living(self) -> list[Node]:
        """The nodes that run (one that is paused included)."""
        return [node for node in self.nodes if node.pid]

    def create_vhost(self, name: str) -> str:
        """A new virtual host, on all nodes when this returns; what had the name before is gone."""
        node = self.living[0]
        if any(vhost["name"] == name for vhost in node.api("GET", "/vhosts").json()):
            node.delete_vhost(name)
        path = f"/vhosts/{quote(name, safe='')}"

        def is_made() -> bool:
            node.create_vhost(name)  # 500: a node that has just joined is not ready for one yet
            return True

        def is_everywhere() -> bool:
            state = node.api("GET", path).json().get("cluster_state", {})
            return [state.get(each.name) for each in self.living] == ["running"] * len(self.living)

        self._wait(is_made, f"virtual host '{name}'")
        self._wait(is_everywhere, f"virtual host '{name}' on every node")
        return name

    def declare(self, vhost: str, queue: str, *, home: int = 0, quorum: bool = False, **arguments: int | str) -> None:
        """A durable queue whose leader (classic: whose only copy) is on node `home`."""
        body = {
            "durable": True,
            "node": self.nodes[home].name,
            "arguments": {"x-queue-type": "quorum" if quorum else "classic", **arguments},
        }
        self.living[0].api("PUT", self._path(vhost, queue), body)
        if quorum:
            self._wait(lambda: len(self.members_of(vhost, queue)) == NODES_COUNT, f"three members of '{queue}'")

    def leader_of(self, vhost: str, queue: str) -> Node:
        """The node with the leader of a quorum queue, or with the only copy of a classic one."""
        description = self._described(vhost, queue)
        name = description.get("leader") or description["node"]
        return next(node for node in self.nodes if node.name == name)

    def members_of(self, vhost: str, queue: str) -> list[str]:
        """The names of the nodes on which a quorum queue has a member that answers."""
        return [str(name) for name in self._described(vhost, queue).get("online", [])]

    def heal(self) -> None:
        """Whole again: whoever is paused goes on, whoever is dead is started, and all see one another."""
        for node in self.living:
            node.resume()
        dead = [node for node in self.nodes if not node.pid]
        for node in dead:
            node.launch()
        for node in dead:
            node.wait_ready()
        self._wait(self._is_whole, "a whole cluster")

    def _is_whole(self) -> bool:
        wanted = {node.name for node in self.nodes}
        seen = [node.api("GET", "/nodes").json() for node in self.nodes]
        return all({each["name"] for each in nodes if each.get("running")} == wanted for nodes in seen)

    def _described(self, vhost: str, queue: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.living[0].api("GET", self._path(vhost, queue)).json()
        return answer

    @staticmethod
    def _path(vhost: str, queue: str) -> str:
        return f"/queues/{quote(vhost, safe='')}/{quote(queue, safe='')}"

    def _wait(self, fact: Callable[[], bool], what: str) -> None:
        what = f"RabbitMQ {self.version}: {what}"
        wait_until(fact, what, timeout_s=READY_TIMEOUT_S, log=lambda: "\n".join(node.log() for node in self.nodes))
