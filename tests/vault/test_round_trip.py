"""Whatever AMQP can carry goes into the vault, is shown and exported, and comes out byte for byte."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from holdfast.core.message import Delivery, Outgoing
from holdfast.core.selection import Selection
from holdfast.engines.postgres.database import SCHEMA
from holdfast.errors import StorageFailed
from holdfast.settings import Secret
from tests.faces.api.conftest import AdminInstallation, open_installation
from tests.support.amqp import Admin, properties, raw_header
from tests.support.postgres import emptied
from tests.vault.letters import ADMIN, DLQ, MAIN, dead, vault_app_on

pytestmark = pytest.mark.rabbitmq
LARGE = bytes(range(256)) * (16 * 1024 * 1024 // 256)


def long(kind: str, payload: bytes) -> bytes:
    return kind.encode() + struct.pack(">I", len(payload)) + payload


def entry(name: str, raw: bytes) -> bytes:
    return bytes([len(name.encode())]) + name.encode() + raw


#: Every type of a header value that the broker takes, at its edges; it has no infinite numbers.
VALUES = {
    "true": b"t\x01",
    "int8": b"b\x80",
    "uint8": b"B\xff",
    "int16": b"s\x80\x00",
    "uint16": b"u\xff\xff",
    "int32": b"I\x80\x00\x00\x00",
    "uint32": b"i\xff\xff\xff\xff",
    "int64": b"l\x80" + bytes(7),
    "int64-max": b"l\x7f" + b"\xff" * 7,
    "beyond-2-53": b"l" + struct.pack(">q", 2**53 + 1),
    "float": b"f" + struct.pack(">f", 1.5),
    "double": b"d" + struct.pack(">d", 0.1),
    "decimal": b"D\x02" + struct.pack(">I", 12345),
    "text": long("S", "ключ 🔑".encode()),
    "not-utf-8": long("S", b"\xff\xfe"),
    "empty-text": long("S", b""),
    "nul": long("S", b"a\x00b"),
    "bytes": long("x", bytes(range(256))),
    "timestamp": b"T" + struct.pack(">Q", 1_700_000_000),
    "timestamp-far": b"T" + struct.pack(">Q", 2**40),
    "void": b"V",
    "array": long("A", b"V" + b"t\x00" + long("S", b"x") + long("A", b"l" + bytes(8)) + long("F", entry("v", b"V"))),
    "table": long("F", entry("inner", long("F", entry("deep", b"D\x00\x00\x00\x00\x01"))) + entry("", b"V")),
    "empty-table": long("F", b""),
    "empty-array": long("A", b""),
    "n" * 255: b"V",
    "ключ": b"V",
}


def with_values(body: bytes) -> Outgoing:
    """A dead letter with every kind of header value."""
    plain = dead(body)
    pieces = properties.split(plain.properties)
    payload = pieces["headers"][4:] + b"".join(entry(name, raw) for name, raw in VALUES.items())
    pieces["headers"] = struct.pack(">I", len(payload)) + payload
    return Outgoing("", DLQ, properties.join(pieces), body)


def values_of(delivery: Delivery | bytes) -> dict[str, bytes | None]:
    raw = delivery if isinstance(delivery, bytes) else delivery.properties
    headers = properties.split(raw)["headers"]
    return {name: raw_header(headers, name) for name in VALUES}


async def redriven(installation: AdminInstallation, queue: str = DLQ) -> dict[str, object]:
    async with installation.client() as client:
        answer = await client.post(f"/admin/dlq/queues/{quote(queue, safe='')}/re-drive", json={"limit": 100})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


async def exported(installation: AdminInstallation) -> list[dict[str, str]]:
    async with installation.client() as client:
        text = (await client.get("/admin/export")).text
        return [json.loads(line) for line in text.splitlines()][::-1]


def on(admin: Admin) -> dict[str, object]:
    return {"broker": Secret(admin.node.url(admin.vhost)), "management": Secret(admin.node.management_url)}


async def test_bodies_of_every_kind_are_shown_exported_and_sent_back_as_they_came(admin: Admin, tmp_path: Path) -> None:
    bodies = [b"", b"\x00", bytes(range(256)), "текст".encode(), bytes(2**20), bytes(2**20 + 1), LARGE]
    await admin.publish([dead(body, message_id=f"m{number}") for number, body in enumerate(bodies)])
    async with open_installation(tmp_path, **on(admin)) as installation:
        async with installation.client() as client:
            assert (await client.post("/admin/captures", json={"queue": DLQ})).json()["captured"] == len(bodies)
            for number, body in enumerate(bodies, 1):
                shown = (await client.get(f"/admin/letters/{number}/body")).content
                assert hashlib.sha256(shown).digest() == hashlib.sha256(body).digest()
                assert (await client.get(f"/admin/letters/{number}")).json()["body_bytes"] == len(body)
        for line, body in zip(await exported(installation), bodies, strict=True):
            assert hashlib.sha256(base64.b64decode(line["body"])).digest() == hashlib.sha256(body).digest()
        assert len([path for path in (tmp_path / "data/vault-blobs").rglob("*") if path.is_file()]) == 2
        assert (await redriven(installation))["redriven"] == len(bodies)
    found = await admin.drain(MAIN, len(bodies))
    assert [hashlib.sha256(one.body).hexdigest() for one in found] == [hashlib.sha256(b).hexdigest() for b in bodies]


async def test_a_letter_whose_body_is_gone_does_not_hold_up_its_neighbours(admin: Admin, tmp_path: Path) -> None:
    await admin.publish([dead(b"before"), dead(bytes(2**20 + 1), message_id="large"), dead(b"after")])
    async with open_installation(tmp_path, **on(admin)) as installation, installation.client() as client:
        assert (await client.post("/admin/captures", json={"queue": DLQ})).json()["captured"] == 3
        (blob,) = [path for path in (tmp_path / "data/vault-blobs").rglob("*") if path.is_file()]
        blob.unlink()
        task = await redriven(installation)
        assert (task["redriven"], task["kept"]) == (2, 1), task
        assert (await client.get("/admin/letters/2")).json()["state"] == "captured"
    assert [one.body for one in await admin.drain(MAIN, 2)] == [b"before", b"after"]


async def test_header_values_of_every_type_keep_their_bytes(admin: Admin, tmp_path: Path) -> None:
    await admin.queue("witness")
    letter = with_values(b"x")
    await admin.publish([letter, Outgoing("", "witness", letter.properties, letter.body)])
    (witness,) = await admin.drain("witness", 1)
    assert values_of(witness) == VALUES, "the broker itself keeps them"
    async with open_installation(tmp_path, **on(admin)) as installation:
        async with installation.client() as client:
            assert (await client.post("/admin/captures", json={"queue": DLQ})).json()["captured"] == 1
            shown = (await client.get("/admin/letters/1")).json()["headers"]
        assert shown["int64-max"] == 2**63 - 1
        assert (shown["beyond-2-53"], shown["void"], shown["decimal"]) == (2**53 + 1, None, {"decimal": "123.45"})
        assert shown["bytes"] == {"bytes": base64.b64encode(bytes(range(256))).decode()}
        assert shown["table"]["inner"]["deep"] == {"decimal": "1"}
        assert set(VALUES) <= set(shown)
        (line,) = await exported(installation)
        assert values_of(base64.b64decode(line["raw_properties"])) == VALUES
        assert (await redriven(installation))["redriven"] == 1
    (back,) = await admin.drain(MAIN, 1)
    assert values_of(back) == VALUES


@pytest.mark.parametrize(
    "name",
    [
        "every !\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ character",
        "línea\ttab\x01\x7f",
        "очередь/🔑",
        "q" * 251,
        " ",
    ],
    ids=["ascii", "control", "unicode", "longest", "blank"],
)
async def test_a_queue_may_be_called_anything(admin: Admin, tmp_path: Path, name: str) -> None:
    dlq = await admin.queue(f"{name}.dlq")
    await admin.queue(name)
    await admin.publish([dead(b"1", queue=dlq, message_id=name, **{"x-original-queue": name})])
    async with open_installation(tmp_path, **on(admin)) as installation:
        async with installation.client() as client:
            answer = await client.post("/admin/captures", json={"queue": dlq})
            assert (answer.status_code, answer.json().get("captured")) == (200, 1), answer.text
            (found,) = [one for one in (await client.get("/admin/dlq/queues")).json() if one["queue"] == dlq]
            assert (found["captured"], found["source_queue"]) == (1, name)
            (letter,) = (await client.get("/admin/letters", params={"queue": dlq})).json()["letters"]
            assert (letter["queue"], letter["message_id"]) == (dlq, name)
            seen = (await client.get(f"/admin/dlq/queues/{quote(dlq, safe='')}/messages")).json()
            assert [one["message_id"] for one in seen["messages"]] == [name]
            assert (
                name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                in (await client.get("/metrics")).text
            )
        assert (await redriven(installation, dlq))["redriven"] == 1
    assert [one.body for one in await admin.drain(name, 1)] == [b"1"]


@pytest.mark.postgres
async def test_postgresql_keeps_large_bodies_in_a_blob_store_that_is_named(
    admin: Admin, tmp_path: Path, postgres_url: str
) -> None:
    emptied(postgres_url)
    bodies = [b"small", bytes(2**20 + 1)]
    await admin.publish([dead(body) for body in bodies])
    vault, key = Secret(postgres_url), Secret("k")
    async with vault_app_on(
        admin, tmp_path, vault=vault, ledger_key=key, vault_blobs=f"{tmp_path}/shared"
    ) as vault_app:
        assert (await vault_app.custody.capture(DLQ, ADMIN, idle_s=0.3)).captured == 2
        letters = (await vault_app.vault.letters.find(Selection(), count_max=5)).letters[::-1]
        assert [(await vault_app.custody.content(one)).body for one in letters] == bodies
    with psycopg.connect(postgres_url) as connection:
        connection.execute(f"SET search_path = {SCHEMA}")
        rows = connection.execute("SELECT length(body), blob <> '' FROM contents ORDER BY letter").fetchall()
        assert rows == [(5, False), (0, True)]
    async with vault_app_on(admin, tmp_path, vault=vault, ledger_key=key) as elsewhere:
        assert (await elsewhere.custody.content(letters[0])).body == b"small"
        with pytest.raises(StorageFailed, match="vault_blobs"):
            await elsewhere.custody.content(letters[1])
