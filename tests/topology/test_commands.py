"""`holdfast topology …` against a broker: what it prints and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Inside
from tests.support.ports import free_ports
from tests.support.rabbitmq import Node, vhost_name
from tests.topology.conftest import EXAMPLES

pytestmark = pytest.mark.rabbitmq

SMALL = "[unroutable]\nenabled = false\n[queues.q]\n"


@pytest.fixture
def vhost(request: pytest.FixtureRequest, node: Node) -> Iterator[str]:
    name = vhost_name(request.node.name)
    node.create_vhost(name)
    yield name
    node.delete_vhost(name)


class Topology(Inside):
    """The command with the management API's address."""

    management: str = ""

    def environment(self, **variables: str) -> dict[str, str]:
        return super().environment(**{"HOLDFAST_MANAGEMENT_URL": self.management, **variables})


@pytest.fixture
def run(tmp_path: Path, node: Node, vhost: str) -> Topology:
    command = type("Here", (Topology,), {"management": node.management_url})(tmp_path, node.url(vhost))
    assert isinstance(command, Topology)
    (tmp_path / "small.toml").write_text(SMALL)
    return command


def test_from_plan_to_clean(run: Topology) -> None:
    planned = run.done("topology", "plan", EXAMPLES / "media.toml")
    assert "+ queue 'q.audit.dlq' is missing" in planned.text
    assert "remark: q.audit, q.audit.retry, q.extractor and 11 more: a classic queue" in planned.text
    assert run("topology", "check", EXAMPLES / "media.toml").code == 1
    applied = run.done("topology", "apply", EXAMPLES / "media.toml", "--json").document
    assert applied["done"] is True
    assert len(applied["created"]) == 63
    assert {probe["outcome"] for probe in applied["probes"]} == {"arrived"}
    assert "the broker is as the file says" in run.done("topology", "check", EXAMPLES / "media.toml").text
    assert "nothing was to be done" in run.done("topology", "apply", EXAMPLES / "media.toml").text
    document = run.done("topology", "check", EXAMPLES / "media.toml", "--json").document
    assert (document["clean"], document["version"], document["differences"]) == (True, "3.10", [])


def test_a_definitions_file_is_planned_tried_and_drawn(run: Topology, tmp_path: Path) -> None:
    media = EXAMPLES / "media.definitions.json"
    assert "+ queue 'q.audit.dlq' is missing" in run.done("topology", "plan", media).text
    assert "q.audit.dlq" in run.done("topology", "draw", media).text
    assert run("topology", "check", media).code == 1
    assert "+ queue 'q.audit.dlq' is missing" in run.done("topology", "import", media, "--dry-run").text
    assert run("topology", "check", media).code == 1
    run.done("topology", "import", media)
    run.done("topology", "check", media)
    (tmp_path / "bad.json").write_text('{"queues": [{"name": "q", "arguments": {"x-message-ttl": 5}}]}')
    tried = run("topology", "import", "bad.json", "--dry-run")
    assert (tried.code, "! 'q': what expires in it is deleted" in tried.text) == (1, True)
    assert run("topology", "import", "bad.json", "--dry-run", "--accept-hazards").code == 0
    (tmp_path / "odd.json").write_text('{"policies": [{"name": "p", "pattern": "(", "definition": {}}]}')
    assert "'p': its pattern cannot be read here" in run("topology", "import", "odd.json", "--dry-run").text


def test_what_cannot_be_changed_ends_partly_done_then_failed(run: Topology, node: Node, vhost: str) -> None:
    node.api("PUT", f"/queues/{vhost}/q", {"durable": True, "arguments": {"x-max-length": 3}})
    first = run("topology", "apply", "small.toml")
    assert first.code == 3
    assert "! queue 'q' is different: x-dead-letter-exchange is (none), wanted 'retry.q'" in first.text
    assert "way out: empty it and end its consumers" in first.text
    second = run("topology", "apply", "small.toml", "--json")
    assert second.code == 1
    assert second.document["remaining"][0]["aspects"][-1] == {"name": "x-max-length", "wanted": None, "found": 3}


def test_export_and_import(run: Topology, tmp_path: Path) -> None:
    run.done("topology", "export", EXAMPLES / "quorum.toml", "--output", "quorum.json")
    imported = run.done("topology", "import", "quorum.json")
    assert "19 things made; read back: nothing differs" in imported.text
    exported = run.done("topology", "export").document
    assert len(exported["queues"]) == 9
    assert run.done("topology", "check", EXAMPLES / "quorum.toml").code == 0
    (tmp_path / "more.json").write_text('{"users": [{"name": "eve"}], "queues": [{"name": "unroutable"}]}')
    for way in (("plan",), ("import", "--dry-run")):
        assert "left out: users" in run("topology", *way, "more.json").text
    ended = run("topology", "import", "more.json")
    assert ended.code == 1
    assert "! queue 'unroutable' is different: type is 'quorum', wanted 'classic'" in ended.text
    assert "left out: users" in ended.text


def test_an_import_that_ends_half_way_says_what_is_there(run: Topology, tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text(
        '{"exchanges": [{"name": "x", "type": "fanout"}], "queues": [{"name": "q"}],'
        ' "policies": [{"name": "p", "pattern": "q", "definition": {"no-such-setting": 5}}]}'
    )
    ended = run("topology", "import", "half.json", "--accept-hazards")
    assert ended.code == 3
    assert "definitions were refused" in ended.text
    assert "what was made before that is there" in ended.text
    made = [line.split()[2] for line in ended.text.splitlines() if line.startswith("+ ") and line.endswith(" was made")]
    document = run.done("topology", "export").document
    assert sorted(made) == sorted(one["name"] for part in ("exchanges", "queues") for one in document[part])


def test_mistakes_are_told_in_a_line_and_change_nothing(run: Topology, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[queues.q]\nmax_length = 5\n")
    (nobody,) = free_ports(1)
    assert "topology is unsafe; 'q': x-max-length" in run("topology", "apply", "bad.toml").stderr
    assert "file cannot be read; 'gone.toml'" in run("topology", "apply", "gone.toml").stderr
    away = run("topology", "apply", "small.toml", "--management", f"http://u:secret@127.0.0.1:{nobody}", "--json")
    assert away.code == 1
    assert "management API cannot be reached" in away.error["message"]
    assert "secret" not in away.stderr
    nowhere = run("topology", "plan", "small.toml", "--url", "sqlite:///here")
    assert nowhere.code == 2
    assert "no broker was named" in nowhere.stderr
    assert run("topology", "plan", "small.toml", "--url", f"amqp://u:secret@127.0.0.1:{nobody}").code == 1
    assert run("topology", "frobnicate").code == 2
    assert run.done("topology", "export").document["queues"] == []


def test_pictures_need_no_broker(tmp_path: Path) -> None:
    run = Inside(tmp_path, "memory://")
    assert run.done("topology", "draw", EXAMPLES / "media.toml").text.startswith("flowchart LR\n")
    run.done("topology", "draw", EXAMPLES / "media.toml", "--format", "svg", "--output", "picture.svg")
    assert (tmp_path / "picture.svg").read_text("utf-8").startswith("<svg ")
    document = run.done("topology", "draw", EXAMPLES / "quorum.toml", "--broker-version", "4.0", "--json").document
    assert document["format"] == "mermaid"
    bad = run("topology", "draw", EXAMPLES / "quorum.toml", "--broker-version", "four")
    assert bad.code == 1
    assert "'four' is not a version" in bad.stderr
    assert run("topology", "draw", EXAMPLES / "quorum.toml", "--output", "no/such/folder").code == 1
