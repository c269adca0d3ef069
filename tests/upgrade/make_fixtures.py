"""Makes the fixtures of this folder: run once, with the commit whose formats are to be kept.

    git worktree add /tmp/before COMMIT && cp -r tests/upgrade /tmp/before/tests/
    make -C /tmp/before .venv/.ready-dev && cd /tmp/before
    .venv/bin/python -m tests.upgrade.make_fixtures FOLDER

It starts a RabbitMQ and a PostgreSQL of its own. Data are made by the program itself, by commands, over HTTP and by the
names of `holdfast`, and ended by SIGKILL where a kill leaves more than a clean end does. The name of this machine and
anything random that looks like a secret are kept out by a `sitecustomize` in every process. Beside each archive is a
JSON file with what the old program said of its data; that is what the tests compare with.

Those that are here were made by 2a65255, the commit before the modules were laid out anew.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.postgres import Cluster, running_cluster
from tests.support.rabbitmq import running_node
from tests.upgrade import story
from tests.upgrade.broker import Broker, Found, virtual_host
from tests.upgrade.server import Server, serving

ROOT = Path(__file__).parents[2]
#: What a process would otherwise say of this machine, and what it would make up.
SITECUSTOMIZE = """
import itertools, os, secrets, socket
numbers = itertools.count(1)
socket.gethostname = lambda: "fixture"
_uname = os.uname()
os.uname = lambda: os.uname_result((_uname[0], "fixture", *_uname[2:]))
step = os.environ.get("FIXTURE_STEP", "")
secrets.token_urlsafe = lambda size=32: f"not-a-secret-of-a-fixture-{step}-{next(numbers)}"
secrets.token_hex = lambda size=32: f"{next(numbers):0{2 * size}x}"
"""
PORT_IN_JOURNAL = 5672


class Making:
    """One set of fixtures in the making."""

    def __init__(self, folder: Path, broker: Broker) -> None:
        self.folder = folder
        self.broker = broker
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
        self.steps = 0

    def env(self, **variables: str) -> dict[str, str]:
        """The environment of a step."""
        self.steps += 1
        return {
            "PYTHONPATH": f"{self.folder / 'site'}:{ROOT}",
            "LOGNAME": "fixture",
            "FIXTURE_STEP": str(self.steps),
            "HOLDFAST_BROKER": self.broker.url,
            "HOLDFAST_MANAGEMENT": self.broker.node.management_url,
            **variables,
        }

    def scene(self, name: str, url: str, *, killed: bool = False, **variables: str) -> dict[str, Any]:
        """Run a step of `scenes`; what it noted."""
        argv = [sys.executable, "-m", "tests.upgrade.scenes", name, url]
        return self.run(argv, killed=killed, **variables)

    def run(self, argv: list[str], *, killed: bool = False, **variables: str) -> dict[str, Any]:
        """Run a program; its last line is a document."""
        env = {**os.environ, **self.env(**variables)}
        ended = subprocess.run(argv, cwd=self.folder, env=env, capture_output=True, text=True, check=False, timeout=120)
        if ended.returncode != (-signal.SIGKILL if killed else 0):
            raise RuntimeError(f"{argv} ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
        lines = ended.stdout.splitlines()
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        return found


# --- queues, vault and collector ----------------------------------------------------------------------------------


def make_installation(making: Making, url: str, folder: Path, **variables: str) -> dict[str, Any]:
    """Everything that one storage can hold; what the old program says of it."""
    told: dict[str, Any] = {}
    making.scene("queues", url)
    told |= make_vault(making, url, folder)
    making.scene("collect", url, killed=False, **variables)
    making.scene("failed_import", url, HOLDFAST_DATA_FOLDER=str(folder))
    told |= making.scene("more_deaths", url)
    with installed(making, url, folder, HOLDFAST_CRASH_AT="vault.after_put:1") as server:
        told |= vault_told(server)
        late_letters(making.broker)
        begin(server, "/admin/captures", {"queue": story.LATE_DLQ})
        server.wait_killed()
    with installed(making, url, folder, HOLDFAST_CRASH_AT="redrive.after_confirm:1") as server:
        plan = server.post("/admin/plans", {"selection": {"queue": story.DLQ, "ids": told["redriving"]}})
        begin(server, "/admin/redrives", {"plan": plan["hash"], "operation": "killed", "name": "killed"})
        server.wait_killed()
    arrived = making.broker.drain(story.SCAN)
    told["arrived"] = [one.id for one in arrived]
    told["redrive_ids"] = {one.id: one.headers["x-redrive-id"] for one in arrived}
    making.scene("collect_open", url, killed=True, HOLDFAST_CRASH_AT="collect.after_index:4", **variables)
    told |= making.scene("listed", url)
    crash = {"HOLDFAST_CRASH_AT": "dead.after_arrive:1"} if url.startswith("sqlite") else {}
    told |= making.scene("die", url, killed=True, **crash)
    told["made_at"] = round(time.time())
    return told


@contextmanager
def installed(making: Making, url: str, folder: Path, **variables: str) -> Iterator[Server]:
    """The old server on it."""
    with serving(url, folder, env=making.env(**variables)) as server:
        yield server


def make_vault(making: Making, url: str, folder: Path) -> dict[str, Any]:
    """Letters of both origins in every state, edits, groups, plans, tasks, tokens, and who was refused what."""
    broker = making.broker
    for queue in (story.DLQ, story.LATE_DLQ, story.SCAN):
        broker.queue(queue)
    for number in range(1, 11):
        told = story.PARKED if number > 6 else None
        broker.publish(story.DLQ, story.body(number), story.letter(number, told=told))
    broker.publish(story.DLQ, story.LARGE, story.letter(11))
    with installed(making, url, folder) as server:
        assert server.post("/admin/captures", {"queue": story.DEAD})["captured"] == 3
        assert server.post("/admin/captures", {"queue": story.DLQ})["captured"] == 11
        ids = {one["message_id"]: one["id"] for one in server.get("/admin/letters", limit=100)["letters"]}
        m = [0, *(ids[f"m-{number:03}"] for number in range(1, 12))]
        came_back(server, broker, m[1], m[2])
        act(server, "resolve", m[2])
        act(server, "archive", m[3])
        act(server, "discard", m[4])
        edit(server, m[5])
        task = redrive(server, [m[6], m[7]], max_per_s=1, operation="cancelled")
        wait_for(lambda: server.get(f"/admin/redrives/{task}")["redriven"] == 1)
        server.post(f"/admin/redrives/{task}/cancel")
        task = redrive(server, [m[8], m[9]], max_per_s=1, operation="paused")
        wait_for(lambda: server.get(f"/admin/redrives/{task}")["redriven"] == 1)
        server.post(f"/admin/redrives/{task}/pause")
        groups = server.get("/admin/groups")["groups"]
        server.post(f"/admin/groups/{groups[0]['key']}", {"status": "ignored", "note": "known since May"})
        server.post(f"/admin/groups/{groups[-1]['key']}", {"status": "resolved"})
        plan = server.post("/admin/plans", {"selection": {"queue": story.DEAD}})
        tokens = make_tokens(server)
        broker.drain(story.SCAN)
        return {"plan": plan, "tokens": tokens, "redriving": [m[5], m[10], m[11]], "paused": task}


def came_back(server: Server, broker: Broker, *letters: int) -> None:
    """Two are redriven; the first dies again, and is captured as a new letter."""
    task = redrive(server, list(letters), operation="done")
    wait_for(lambda: server.get(f"/admin/redrives/{task}")["state"] == "done")
    found: list[Found] = broker.drain(story.SCAN)
    again = next(one for one in found if one.id == "m-001")
    broker.publish(story.DLQ, again.body, again.properties)
    assert server.post("/admin/captures", {"queue": story.DLQ})["captured"] == 1


def redrive(server: Server, letters: list[int], *, operation: str, max_per_s: int = 0) -> int:
    """A task; its number."""
    wanted = {"selection": {"queue": story.DLQ, "ids": letters}, "max_per_s": max_per_s}
    plan = server.post("/admin/plans", wanted)
    request = {"plan": plan["hash"], "operation": operation, "name": operation, "reason": "for the fixture"}
    return int(server.post("/admin/redrives", request)["id"])


def act(server: Server, word: str, letter: int) -> None:
    """One letter."""
    request = {"selection": {"ids": [letter]}, "count": 1, "reason": f"to {word} it"}
    assert server.post(f"/admin/letters/{word}", request) == {"count": 1}


def edit(server: Server, letter: int) -> None:
    """Two revisions."""
    changed = base64.b64encode(b'{"n": 5, "text": "pear"}').decode()
    path = f"/admin/letters/{letter}/revisions"
    put = {"tenant": "other", "new": 7}
    server.post(path, {"revision": 0, "body": changed, "put": put, "reason": "mended"})
    server.post(path, {"revision": 1, "put": put, "drop": ["weight"], "reason": "and lighter"})


def make_tokens(server: Server) -> dict[str, str]:
    """One of each role; one is revoked, and one was refused something."""
    wanted: dict[str, dict[str, Any]] = {
        "reader": {"role": "viewer"},
        "clerk": {"role": "operator", "queues": ["imageviewer.*"], "expires_in": story.LONG},
        "former": {"role": "admin"},
    }
    tokens = {name: server.post("/admin/tokens", {"name": name, **more})["token"] for name, more in wanted.items()}
    assert server.http.delete("/admin/tokens/former").status_code == 200
    refused = server.http.post(
        "/admin/letters/discard",
        json={"selection": {"ids": [1]}, "count": 1},
        headers={"authorization": f"Bearer {tokens['reader']}"},
    )
    assert refused.status_code == 403
    return tokens


def late_letters(broker: Broker) -> None:
    """Those whose capture is killed between the vault and the ack."""
    for number in (21, 22):
        broker.publish(story.LATE_DLQ, story.body(number), story.letter(number))


def begin(server: Server, path: str, body: dict[str, Any]) -> None:
    """A request whose answer never comes."""
    try:
        server.http.post(path, json=body)
    except Exception:  # noqa: BLE001 - the server is killed
        return


def vault_told(server: Server) -> dict[str, Any]:
    """All that can be asked of the vault."""
    letters = server.get("/admin/letters", limit=100)["letters"]
    exported = server.http.get("/admin/export", params={"queue": story.DLQ}).text.splitlines()
    lines = [json.loads(line) for line in exported]
    return {
        "admin_token": server.token,
        "letters": letters,
        "exported": [without_large(line) for line in lines],
        "revisions": {one["id"]: server.get(f"/admin/letters/{one['id']}/revisions") for one in letters},
        "history": {one["id"]: server.get(f"/admin/letters/{one['id']}/history")["rows"] for one in letters[:5]},
        "groups": server.get("/admin/groups")["groups"],
        "redrives": server.get("/admin/redrives")["redrives"],
        "token_list": server.get("/admin/tokens"),
        "failed": server.get("/admin/imports/failed")["failed"],
        "balance": server.get("/admin/balance"),
        "ledger": server.get("/admin/ledger", limit=1000)["rows"],
        "anchor": server.get("/admin/ledger/head")["head"],
    }


def without_large(line: dict[str, Any]) -> dict[str, Any]:
    """A body of a mebibyte is not repeated."""
    return {**line, "body": ""} if len(line["body"]) > 100_000 else line


def wait_for(fact: Callable[[], bool]) -> None:
    """Until it is so."""
    deadline = time.monotonic() + 30
    while not fact():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


# --- a recovery that was killed, its backup, and a consumer that was killed ---------------------------------------


def make_recovery(making: Making, out: Path) -> None:
    """A journal with entries, the backup of the same run, and which letters had arrived."""
    broker = making.broker
    broker.exchange(story.EXCHANGE, story.SCAN)
    for number in range(1, story.RECOVERED + 1):
        broker.publish(story.DLQ, story.body(number), story.letter(number))
    journal, backup = making.folder / "journal", making.folder / "backup.jsonl"
    argv = [str(Path(sys.executable).with_name("holdfast")), "recover", broker.url, story.DLQ, "--json"]
    argv += ["--journal", str(journal), "--backup", str(backup), "--window", "4", "--by", "fixture"]
    making.run(argv, killed=True, HOLDFAST_CRASH_AT="recover.after_journal:3", XDG_STATE_HOME=str(making.folder))
    arrived = [one.id for one in broker.drain(story.SCAN)]
    left = {one.id for one in broker.drain(story.DLQ)}
    head, _, records = journal.read_bytes().partition(b"\n")
    first = json.loads(head)
    first["boot"] = "the boot id of the machine"
    first["source"] = re.sub(r":\d+$", f":{PORT_IN_JOURNAL}", first["source"])
    (out / "recovery.journal").write_bytes(json.dumps(first, separators=(",", ":")).encode() + b"\n" + records)
    (out / "recovery.backup.jsonl").write_bytes(backup.read_bytes())
    told = {"arrived": sorted(arrived), "left": sorted(left), "records": len(records) // 17}
    note(out, "recovery", told)


def make_starts(making: Making, out: Path) -> None:
    """A message that ended its process once."""
    store = making.folder / "starts"
    program = (
        "import os, signal, sys, holdfast\n"
        "app = holdfast.App(os.environ['FIXTURE_URL'], store=f'sqlite:///{sys.argv[1]}')\n"
        "@app.consumer('work', retry=holdfast.Retry(attempts=3, delay='100ms'))\n"
        "async def handle(message):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "import asyncio\n"
        "asyncio.run(app.run(declare=True))\n"
    )
    making.broker.queue("work")
    making.broker.publish("work", story.body(31), story.letter(31))
    argv = [sys.executable, "-c", program, str(store)]
    making.run(argv, killed=True, FIXTURE_URL=making.broker.url)
    pack(out / "starts.tar.gz", {"starts": store})
    note(out, "starts", {"made_at": round(time.time())})


# --- packing ------------------------------------------------------------------------------------------------------


def pack(file: Path, folders: dict[str, Path]) -> None:
    """Folders as one archive, with nothing of their owner."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if info.name.endswith("-shm"):
            return None  # made anew from the log
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, folder in folders.items():
            archive.add(folder, name, filter=plain)
    file.write_bytes(gzip.compress(raw.getvalue(), 9, mtime=0))


def dump(cluster: Cluster, database: str, file: Path) -> None:
    """The database as SQL, without what only psql understands."""
    argv = ["pg_dump", "--inserts", "--rows-per-insert=50", "--no-owner", "--no-privileges", cluster.url(database)]
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    lines = [line for line in text.splitlines() if not line.startswith("\\")]
    file.write_bytes(gzip.compress("\n".join(lines).encode(), 9, mtime=0))


def note(out: Path, name: str, value: object) -> None:
    """What the old program said."""
    (out / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(value, ensure_ascii=False).encode(), 9, mtime=0))


def main(out: Path) -> None:
    """All of them."""
    out.mkdir(parents=True, exist_ok=True)
    with running_node() as node, running_cluster() as cluster, TemporaryDirectory(prefix="fixture-") as temporary:
        for store in story.STORES:
            place = Path(temporary, store)
            place.mkdir()
            with virtual_host(node, story.VHOST) as broker:
                making = Making(place, broker)
                folder, blobs = place / "data", place / "collected"
                if store == "sqlite":
                    told = make_installation(making, f"sqlite:///{folder}", folder)
                    pack(out / "sqlite.tar.gz", {"data": folder})
                else:
                    url = cluster.create_database("fixture")
                    told = make_installation(making, url, folder, FIXTURE_BLOBS=str(blobs))
                    dump(cluster, "fixture", out / "postgres.sql.gz")
                    pack(out / "postgres.tar.gz", {"data": folder, "collected": blobs})
                note(out, store, told)
        for make in (make_recovery, make_starts):
            place = Path(temporary, make.__name__)
            place.mkdir()
            with virtual_host(node, story.VHOST) as broker:
                broker.queue(story.DLQ)
                broker.queue(story.SCAN)
                make(Making(place, broker), out)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
