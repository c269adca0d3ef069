"""Fixtures that every test may use. A server is started once per run, when it is first asked for."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from tests.support.amqp import Admin
from tests.support.postgres import Cluster
from tests.support.rabbitmq import Node, versions, vhost_name
from tests.support.rabbitmq_cluster import RabbitCluster, cluster_versions
from tests.support.servers import memory_place, skip_left_out

if TYPE_CHECKING:
    from tests.support.browser import Chromium

# `make test` tries the same examples each time, so that a red run speaks of the change; `make soak` looks for new ones.
# No example fails by the clock: this machine may be busy with others.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# Under `nohup` a hang-up is ignored, and in the background of a script Ctrl-C is; and so by every program that is
# started here: also by those that are to hear it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Folders whose files take longest, those first: at the end of a run no worker waits for another's long file.
LONGEST_FIRST = (
    "recover",
    "vault",
    "collect",
    "faults",
    "model",
    "engines",
    "topology",
    "consume",
    "faces/web",
    "faces/api",
    "faces/cli",
    "queue",
)

#: Whose folders are in memory.
MEMORY_FOLDERS = ("collect", "consume", "faces/api", "faces/web", "queue", "recover", "upgrade", "vault")
IN_MEMORY = tuple(f"tests/{name}/" for name in MEMORY_FOLDERS)

#: Of `-m`, as `make test-fast` gives it: a file that is nothing but this need not even be read.
LEFT_OUT = re.compile(r"not \w+( and not \w+)*")
MARKS_OF_A_FILE = re.compile(r"^pytestmark = (.*)$", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    given: str = config.getoption("markexpr")
    if collection_path.suffix != ".py" or not LEFT_OUT.fullmatch(given):
        return None
    marks = MARKS_OF_A_FILE.search(collection_path.read_text("utf-8"))
    names = re.findall(r"pytest\.mark\.(\w+)", marks[1]) if marks else []
    return True if {*names} & {*given.split(" ")} else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_left_out(items)
    items.sort(key=_rank)  # files of one rank stay in the order that chance gave them


def _rank(item: pytest.Item) -> int:
    ranks = (rank for rank, name in enumerate(LONGEST_FIRST) if item.nodeid.startswith(f"tests/{name}/"))
    return next(ranks, len(LONGEST_FIRST))


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In place of pytest's own: an empty folder for its owner alone, in memory where that proves as much."""
    if not request.node.nodeid.startswith(IN_MEMORY):
        yield tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])
        return
    with TemporaryDirectory(prefix="holdfast-", dir=memory_place(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """The PostgreSQL of this run. A test that stops or kills one makes its own: `Cluster()`."""
    with Cluster(memory=memory_place()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def postgres_url(request: pytest.FixtureRequest, postgres: Cluster) -> Iterator[str]:
    """The address of a fresh database, one per test module."""
    name = "test_" + re.sub(r"[^a-z0-9]+", "_", request.module.__name__.lower())[-40:]
    postgres.drop_database(name)
    yield postgres.create_database(name)
    postgres.drop_database(name)


@pytest.fixture(scope="session", params=cluster_versions())
def _rabbitmq_cluster(request: pytest.FixtureRequest) -> Iterator[RabbitCluster]:
    with RabbitCluster(request.param) as cluster:
        yield cluster


@pytest.fixture
def rabbitmq_cluster(_rabbitmq_cluster: RabbitCluster) -> RabbitCluster:
    """Three RabbitMQ nodes, all of them there. A test may kill and pause them: the next one finds them whole again."""
    _rabbitmq_cluster.heal()
    return _rabbitmq_cluster


@pytest.fixture(scope="session")
def nodes() -> Iterator[dict[str, Node]]:
    """A RabbitMQ of each version, started when it is first asked for."""

    class Nodes(dict[str, Node]):
        def __missing__(self, version: str) -> Node:
            self[version] = node = stack.enter_context(Node(version, memory=memory_place()))
            return node

    with ExitStack() as stack:
        yield Nodes()


@pytest.fixture
def node(nodes: dict[str, Node]) -> Node:
    """Debian's RabbitMQ. A test that kills or blocks one makes its own: `with Node()`."""
    return nodes["3.10"]


@pytest.fixture(params=versions())
def every_node(request: pytest.FixtureRequest, nodes: dict[str, Node]) -> Node:
    """Each version in turn, where it is there."""
    return nodes[request.param]


@pytest.fixture
async def admin(request: pytest.FixtureRequest, node: Node) -> AsyncIterator[Admin]:
    """A virtual host of one's own, on Debian's RabbitMQ."""
    async with Admin.open(node, vhost_name(request.node.name)) as admin:
        yield admin


@pytest.fixture
async def every_admin(request: pytest.FixtureRequest, every_node: Node) -> AsyncIterator[Admin]:
    """A virtual host of one's own, on each version in turn."""
    async with Admin.open(every_node, vhost_name(request.node.name)) as admin:
        yield admin


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Chromium]:
    """The browser of this run. Tests that use it run in the session's event loop."""
    from tests.support.browser import open_chromium  # it takes a while to read, and few tests need it

    async with open_chromium() as browser:
        yield browser
