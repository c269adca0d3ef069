"""The command line on a folder of its own: what people type, what they see, how it ends.

Run inside this process, because there are many; tests/faces/cli/test_cli_process.py has the real ones.
"""

from __future__ import annotations

import base64
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.support.command import Command, Inside


@pytest.fixture
def run(tmp_path: Path) -> Command:
    return Inside(tmp_path, "sqlite:///work")


def lines(*objects: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in objects)


def test_a_queue_lives_from_create_to_delete(run: Command) -> None:
    run.done("queue", "create", "orders-dead")
    options = ("--dead-queue", "orders-dead", "--max-attempts", "2", "--lease-timeout", "5m", "--partitions", "2")
    assert run.done("queue", "create", "orders", *options, "--reference", "shop").text == "queue 'orders' was created\n"
    found = run.done("queue", "info", "orders", "--json").document
    assert (found["dead_queue"], found["max_attempts"], found["reference"]) == ("orders-dead", 2, "shop")
    assert (found["lease_timeout"], found["expire_timeout"], len(found["partitions"])) == ("5m0s", "24h0m0s", 2)

    run.done("queue", "update", "orders", "--dead-queue", "", "--max-attempts", "0")
    found = run.done("queue", "info", "orders", "--json").document
    assert "dead_queue" not in found
    assert "max_attempts" not in found
    assert (found["lease_timeout"], found["reference"]) == ("5m0s", "shop")

    assert [queue["queue_name"] for queue in run.done("queue", "list", "--json").documents] == ["orders", "orders-dead"]
    assert run.done("queue", "list", "--limit", "1", "--json").document["queue_name"] == "orders"
    run.done("queue", "produce", "orders", "hello")
    refused = run("queue", "delete", "orders")
    assert (refused.code, refused.stderr) == (1, "error: queue is not empty; 'orders' has 1 item, use --force\n")
    assert run.done("queue", "delete", "orders", "--force", "--json").document == {"code": 200}
    assert run("queue", "info", "orders").stderr == "error: queue does not exist; no such queue named 'orders'\n"


def test_an_item_is_produced_leased_extended_retried_and_completed(run: Command) -> None:
    run.done("queue", "create", "orders")
    placed = run.done(
        "queue", "produce", "orders", "hello", "--kind", "greeting", "--reference", "r", "--json"
    ).document
    leased = run.done("queue", "lease", "orders", "--json").document
    (item,) = leased["items"]
    assert item["id"] == placed["id"]
    assert (base64.b64decode(item["bytes"]), item["kind"], item["reference"]) == (b"hello", "greeting", "r")

    extended = run.done("queue", "extend", "orders", item["id"], "--lease-timeout", "1h", "--json").document
    assert extended["items"][0]["lease_deadline"] > item["lease_deadline"]
    run.done("queue", "retry", "orders", item["id"])
    (again,) = run.done("queue", "lease", "orders", "--json").document["items"]
    assert again["attempts"] == 2
    assert run.done("queue", "complete", "orders", again["id"]).text == "1 item completed\n"

    refused = run("queue", "complete", "orders", item["id"], again["id"], "--json")
    assert refused.code == 1
    assert refused.error["message"] == f"invalid storage id; '{item['id']}' does not exist"
    assert refused.error["details"] == {"ids": [item["id"], again["id"]]}
    empty = run("queue", "lease", "orders", "--timeout", "10ms")
    assert (empty.code, empty.stderr) == (1, "error: request timeout; no items are in the queue, try again\n")


def test_a_rejected_item_goes_to_the_dead_queue_with_its_reason(run: Command) -> None:
    run.done("queue", "create", "dead")
    run.done("queue", "create", "orders", "--dead-queue", "dead")
    run.done("queue", "produce", "orders", "bad")
    (item,) = run.done("queue", "lease", "orders", "--json").document["items"]
    run.done("queue", "retry", "orders", item["id"], "--dead", "--reason", "unknown customer")
    (letter,) = run.done("queue", "items", "list", "dead", "--json").documents
    assert (letter["source_queue"], letter["death_reason"]) == ("orders", "unknown customer")
    assert "unknown customer in orders" in run.done("queue", "items", "list", "dead").text


def test_a_paused_queue_gives_nothing_out_until_resumed(run: Command) -> None:
    run.done("queue", "create", "orders")
    run.done("queue", "produce", "orders", "x")
    run.done("queue", "pause", "orders")
    assert "paused" in run.done("queue", "list").text
    refused = run("queue", "lease", "orders", "--timeout", "10ms")
    assert refused.code == 1
    assert "queue 'orders' is paused and gives nothing out, 'holdfast queue resume orders' ends that" in refused.stderr
    assert run("queue", "lease", "orders", "--timeout", "10ms", "--json").error["code"] == 454
    run.done("queue", "resume", "orders")
    run.done("queue", "lease", "orders", "--timeout", "10s")


def test_clear_says_what_to_clear(run: Command) -> None:
    run.done("queue", "create", "orders")
    run.done("queue", "produce", "orders", "now")
    run.done("queue", "produce", "orders", "later", "--enqueue-at", "+10m")
    run.done("queue", "produce", "orders", "much later", "--enqueue-at", "2199-01-01T00:00:00Z")
    assert run.done("queue", "clear", "orders", "--queue").text == "queue 'orders' was cleared; 1 item queued went\n"
    (partition,) = run.done("queue", "stats", "orders", "--json").document["logicalQueues"][0]["partitions"]
    assert (partition["total"], partition["scheduled"]) == (0, 2)
    listed = run.done("queue", "items", "list", "orders", "--scheduled", "--json").documents
    deleted = run.done("queue", "items", "delete", "orders", listed[0]["id"], "nope", listed[0]["id"])
    assert deleted.text == "1 item deleted; 1 id was not there\n"
    assert run.done("queue", "items", "delete", "orders", "nope").text == "0 items deleted; 1 id was not there\n"
    assert run("queue", "items", "delete", "nowhere", "nope").code == 1
    run.done("queue", "clear", "orders", "--scheduled")
    assert run.done("queue", "items", "list", "orders", "--scheduled").text == "queue 'orders' has no scheduled items\n"


def test_whoever_makes_a_queue_without_a_dead_queue_is_told_what_is_deleted(run: Command) -> None:
    told = run.done("queue", "create", "orders", "--expire-timeout", "2h", "--max-attempts", "3").stderr
    assert told.startswith("note: it has no dead queue; an item that waits longer than 2h, or leased 3 times")
    assert told.count("\n") == 1
    assert run.done("queue", "create", "paid", "--dead-queue", "orders").stderr == ""
    assert run.done("queue", "create", "quiet", "--json").stderr == ""


def test_what_the_service_calls_a_field_is_an_option_here(run: Command) -> None:
    run.done("queue", "create", "orders")
    run.done("queue", "produce", "orders", "x")
    assert run("queue", "delete", "orders").stderr.endswith("use --force\n")


def test_json_lines_are_produced_with_what_each_says(run: Command) -> None:
    run.done("queue", "create", "orders")
    binary = base64.b64encode(bytes(range(256))).decode()
    stdin = lines({"utf8": "é", "kind": "own"}, {"bytes": binary}) + b"\n" + lines({"utf8": "c", "dedupe_key": "k"})
    assert (
        run.done("queue", "produce", "orders", "--kind", "common", stdin=stdin).text == "3 items produced to 'orders'\n"
    )
    items = run.done("queue", "items", "list", "orders", "--json").documents
    assert [base64.b64decode(item["payload"]) for item in items] == ["é".encode(), bytes(range(256)), b"c"]
    assert [item["kind"] for item in items] == ["own", "common", "common"]
    again = run.done("queue", "produce", "orders", "--json", stdin=lines({"utf8": "c", "dedupe_key": "k"})).document
    assert again["id"] == items[2]["id"]


def test_raw_lines_and_whole_files_are_payloads(run: Command) -> None:
    run.done("queue", "create", "orders")
    file = run.folder / "blob"
    file.write_bytes(b"one\r\n\n\xff\xfe")
    run.done("queue", "produce", "orders", "--file", file, "--raw")
    run.done("queue", "produce", "orders", "--file", file, "--whole")
    run.done("queue", "produce", "orders", "--whole", stdin=b"a\nb\n")
    items = run.done("queue", "items", "list", "orders", "--json").documents
    payloads = [base64.b64decode(item.get("payload", "")) for item in items]
    assert payloads == [b"one\r", b"", b"\xff\xfe", b"one\r\n\n\xff\xfe", b"a\nb\n"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"utf8": "x"\n', "line 3 is invalid; input data was truncated"),
        (b'{"utf9": "x"}\n', "line 3 is invalid; object contains unknown field 'utf9'"),
        (b'{"utf8": "\xff"}\n', "line 3 is invalid; "),
        (b"[" * 100_000 + b"\n", "line 3 is invalid; "),
    ],
)
def test_a_bad_line_is_named_and_what_was_stored_before_it_too(run: Command, bad: bytes, reason: str) -> None:
    run.done("queue", "create", "orders")
    stdin = lines({"utf8": "1"}, {"utf8": "2"}) + bad + lines({"utf8": "4"})
    ended = run("queue", "produce", "orders", stdin=stdin)
    assert ended.code == 3
    assert ended.stderr.startswith(f"error: {reason}")
    assert ended.stderr.endswith("the 2 items before were stored, mend it and go on with --from-line 3\n")
    mended = lines({"utf8": "1"}, {"utf8": "2"}, {"utf8": "3"}, {"utf8": "4"})
    run.done("queue", "produce", "orders", "--from-line", "3", stdin=mended)
    items = run.done("queue", "items", "list", "orders", "--json").documents
    assert [base64.b64decode(item["payload"]) for item in items] == [b"1", b"2", b"3", b"4"]


def test_a_bad_first_line_is_a_plain_failure(run: Command) -> None:
    run.done("queue", "create", "orders")
    ended = run("queue", "produce", "orders", "--json", stdin=b"hello\n")
    assert ended.code == 1
    assert ended.error["details"] == {"done_count": 0, "line": 1}
    assert "nothing was stored before" in ended.error["message"]


def test_lines_that_the_queue_refuses_are_named(run: Command) -> None:
    run.done("queue", "create", "orders")
    stdin = lines(*({"utf8": "x"} for _ in range(1_000)), {"utf8": "x", "reference": "r" * 3_000}, {"utf8": "y"})
    ended = run("queue", "produce", "orders", stdin=stdin)
    assert ended.code == 3
    assert "refused; reference field is invalid" in ended.stderr
    assert "go on with --from-line 1001\n" in ended.stderr


def test_an_export_comes_back_byte_for_byte(run: Command) -> None:
    run.done("queue", "create", "orders", "--partitions", "3")
    payloads = [bytes([n % 256]) * (n % 50) for n in range(2_500)]
    stdin = lines(
        *({"bytes": base64.b64encode(payload).decode(), "kind": f"k{n}"} for n, payload in enumerate(payloads))
    )
    run.done("queue", "produce", "orders", stdin=stdin)
    run.done("queue", "produce", "orders", "later", "--enqueue-at", "2199-01-01T00:00:00Z")

    ended = run.done("queue", "items", "export", "orders", "--scheduled", "--output", "all.jsonl")
    assert ended.stderr == "2 501 items exported from 'orders'\n"
    assert not (run.folder / "all.jsonl.partial").exists()
    assert (run.folder / "all.jsonl").stat().st_mode & 0o777 == 0o600, "it holds bodies"
    assert "is there already" in run("queue", "items", "export", "orders", "--output", "all.jsonl").stderr
    assert run.done("queue", "items", "export", "orders").stdout.count(b"\n") == 2_500

    run.done("queue", "create", "copy")
    said = run.done("queue", "items", "import", "copy", "--file", "all.jsonl", "--once").text
    assert said == "2 501 items imported to 'copy', 0 already there\n"
    again = run.done("queue", "items", "import", "copy", "--file", "all.jsonl", "--once", "--json").document
    assert again == {"imported_count": 0, "already_there_count": 2_501}
    copied = run.done("queue", "items", "export", "copy", "--scheduled").documents
    assert {item["kind"]: base64.b64decode(item.get("payload", "")) for item in copied[:-1]} == {
        f"k{n}": payload for n, payload in enumerate(payloads)
    }
    assert copied[-1]["enqueue_at"] == "2199-01-01T00:00:00Z"


def test_an_import_stops_at_a_bad_line(run: Command) -> None:
    run.done("queue", "create", "orders")
    ended = run("queue", "items", "import", "orders", stdin=lines({"payload": "eA=="}, {"payload": 7}))
    assert ended.code == 3
    assert "line 2 is invalid; expected 'bytes', got 'int'" in ended.stderr
    assert "the 1 item before was imported" in ended.stderr


def test_tables_are_for_people(run: Command) -> None:
    run.done("queue", "create", "orders", "--partitions", "2")
    run.done("queue", "produce", "orders", "--raw", stdin=b"\x1b[31mred\n" * 1_500)
    stats = run.done("queue", "stats", "orders").text
    assert "1 500" in stats
    assert "requests waiting: 0 produce" in stats
    listed = run.done("queue", "items", "list", "orders", "--limit", "3")
    assert "\\x1b[31mred" in listed.text
    assert "\x1b" not in listed.text
    assert "--limit 0 shows all" in listed.stderr
    watched = run.done("queue", "watch", "--once").text
    assert "1 500" in watched
    assert [reply["queue_name"] for reply in run.done("queue", "watch", "--once", "--json").documents] == ["orders"]
    assert run("queue", "watch", "nope", "--once").code == 1
    assert "there are no queues here" in run.done("queue", "list", "--url", "memory://").text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["queue", "inf"], "No such command 'inf'. Did you mean 'info'? See 'holdfast queue --help'"),
        (["queue", "info"], "Missing argument 'QUEUE'. See 'holdfast queue info --help'"),
        (["queue", "create", "x", "--max-attempts", "two"], "See 'holdfast queue create --help'"),
        (["queue", "produce", "x", "text", "--raw"], "TEXT is the whole payload"),
        (["queue", "produce", "x", "--raw", "--whole"], "--raw and --whole exclude each other"),
        (["queue", "produce", "x", "--dedupe-key", "k"], '--dedupe-key is for one item; say "dedupe_key" in each line'),
        (["queue", "produce", "x", "t", "--enqueue-at", "soon"], "use 2030-01-31T08:00:00Z or +10m"),
        (["queue", "produce", "x", "t", "--enqueue-at", "2030-01-01T00:00:00"], "end it with Z for UTC"),
        (["queue", "produce", "x", "t", "--enqueue-at", "+zz"], "'zz' is not a duration"),
        (["queue", "produce", "x", "--file", "none.jsonl"], "'none.jsonl': No such file or directory"),
        (["queue", "produce", "x", "--file", "."], "'.': Is a directory"),
        (["queue", "create", "x", "--lease-timeout", "zz"], "--lease-timeout is invalid; 'zz' is not a duration"),
        (["queue", "update", "x", "--expire-timeout", "zz"], "--expire-timeout is invalid; 'zz' is not a duration"),
        (["queue", "lease", "x", "--timeout", "zz"], "--timeout is invalid; 'zz' is not a duration"),
        (["queue", "list", "--url", "ftp://x"], "use one of sqlite:///FOLDER, postgresql://…, memory://"),
        (["queue", "list", "--url", "sqlite://work"], "names no folder, use sqlite:///relative or sqlite:////absolute"),
        (["letters", "list", "--url", "ftp://x"], "use one of sqlite:///FOLDER, postgresql://…, memory://"),
        (
            ["serve", "--url", "ftp://x", "--listen", "127.0.0.1:0"],
            "use one of sqlite:///FOLDER, postgresql://…, memory://",
        ),
        (
            ["serve", "--url", "http://x", "--listen", "127.0.0.1:0"],
            "is the address of a server, a server needs a storage",
        ),
        (["queue", "clear", "x"], "say what to delete; --queue, --scheduled, or both"),
        (["letters", "list", "--older-than", "1x"], "--older-than is invalid; '1x' is not a duration"),
        (["letters", "list", "--state", "foo"], "'foo' is none of captured, redriving, redriven, resolved, came_back"),
        (["letters", "edit", "1", "--revision", "0", "--body-file", "none"], "'none': No such file or directory"),
        (["groups", "change", "x", "--status", "foo"], "'foo' is none of open, resolved, ignored"),
        (["token", "create", "x", "--role", "god"], "'god' is none of viewer, operator, admin"),
        (["plan", "--queue", "x", "--target", "foo"], "'foo' is none of queue, wait, original, address"),
        (["topology", "plan", "none.toml"], "'none.toml': No such file or directory"),
        (["ledger", "verify", "--anchor", "foo"], "--anchor is invalid; it is not what 'holdfast ledger head' prints"),
    ],
)
def test_bad_usage_is_one_line_with_what_to_do(run: Command, arguments: list[str], text: str) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert text in ended.stderr
    assert run(*arguments, "--json").error["code"] == 400


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["queue", "list", "--url", "http://127.0.0.1:1"], "start it with 'holdfast serve', or give another --url"),
        (["queue", "list", "--config", "none.toml"], "none.toml: No such file or directory"),
        (["queue", "create", "a\nb"], "'a\\nb' cannot contain whitespace"),
        (["serve", "--listen", "0.0.0.0:0"], "--tls-cert and --tls-key, or --insecure-http"),
        (["serve", "--auth", "maybe", "--listen", "127.0.0.1:0"], "use one of token, none"),
    ],
)
def test_a_failure_is_one_line_with_what_to_do(run: Command, arguments: list[str], text: str) -> None:
    ended = run(*arguments)
    assert ended.code == 1
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert text in ended.stderr
    assert set(run(*arguments, "--json").error) == {"code", "code_text", "message", "details"}


def test_settings_are_shown_with_their_source(run: Command) -> None:
    (run.folder / "holdfast.toml").write_text("open_files_max = 7", "utf-8")
    shown = run.done("config", "show", "--explain", "--json", HOLDFAST_ADMIN_TOKEN="s3cret").document
    assert shown["open_files_max"]["value"] == 7
    assert shown["open_files_max"]["source"] == "holdfast.toml"
    assert shown["storages"]["source"] == "environment HOLDFAST_URL"
    told = run.done("config", "show", "--explain", HOLDFAST_ADMIN_TOKEN="s3cret").text
    assert "from: environment HOLDFAST_ADMIN_TOKEN" in told
    assert "s3cret" not in told + json.dumps(shown)
    assert "would refuse this" in run.done("config", "show", HOLDFAST_LISTEN="0.0.0.0:1").stderr


def test_code_that_a_file_names_which_lay_there_is_not_run_in_a_shell(run: Command) -> None:
    """It is in `serve`, where somebody has decided in which folder it runs."""
    run.done("queue", "create", "orders.dlq")
    run.done("queue", "create", "orders", "--dead-queue", "orders.dlq")
    function = "def by_queue(kind, death):\n    return Fingerprint('orders', 'all of orders')\n"
    module = f"from holdfast.core.groups import Fingerprint\nopen('it-ran', 'w').close()\n{function}"
    (run.folder / "lying_there.py").write_text(module, "utf-8")
    (run.folder / "holdfast.toml").write_text('fingerprint = "lying_there:by_queue"', "utf-8")
    run.done("queue", "list")
    run.done("letters", "list")
    refused = run("capture", "orders.dlq")
    assert (refused.code, (run.folder / "it-ran").exists()) == (1, False)
    assert refused.stderr.startswith("error: capture is refused; letters are grouped by 'lying_there:by_queue'")
    assert "say --config holdfast.toml if it is to run" in refused.stderr
    assert refused.stderr.count("\n") == 1
    run.done("capture", "orders.dlq", "--config", "holdfast.toml")
    assert (run.folder / "it-ran").exists()


@pytest.mark.parametrize("arguments", [["queue", "list"], ["config", "show"], ["ledger", "verify"], ["serve"]])
def test_a_file_that_everybody_may_write_is_not_believed(run: Command, arguments: list[str]) -> None:
    (run.folder / "holdfast.toml").write_text('url = "http://127.0.0.1:1"', "utf-8")
    (run.folder / "holdfast.toml").chmod(0o666)
    ended = run(*arguments, HOLDFAST_TOKEN="mine")
    assert (ended.code, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith("error: configuration is refused; ./holdfast.toml is not yours alone")


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE queues SET record = CAST(x'7bff' AS TEXT)",
        "UPDATE queues SET record = '{'",
        "UPDATE queues SET record = '{}'",
        "DROP TABLE files",
        b"no database at all, whatever its name says",
        b"SQLite format 3\0" + b"\xff" * 5_000,
    ],
)
def test_a_corrupt_catalog_is_one_line(run: Command, damage: str | bytes) -> None:
    run.done("queue", "create", "orders")
    path = run.folder / "work" / "catalog.db"
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        with closing(apsw.Connection(str(path))) as connection:
            connection.execute(damage)
    for arguments in (
        ["queue", "list"],
        ["queue", "create", "more"],
        ["letters", "list"],
        ["serve", "--listen", "127.0.0.1:0"],
    ):
        ended = run(*arguments)
        assert (ended.code, ended.stderr.count("\n")) == (1, 1), ended
        assert "catalog.db" in ended.stderr


@pytest.mark.parametrize(
    ("url", "arguments"),
    [
        ("http://me:s3cret@127.0.0.1:1", ["queue", "list"]),
        ("http://me:s3cret@127.0.0.1:1", ["letters", "list"]),
        ("http://me:s3cret@127.0.0.1:1", ["recover", "{}", "a.dlq"]),
        ("sqlite://me:s3cret@here/there", ["queue", "list"]),
        ("sqlite://me:s3cret@here/there", ["recover", "{}", "a.dlq"]),
        ("amqp://me:s3cret@[::1/v", ["recover", "{}", "a.dlq"]),
        ("amqp://me:s3/cret@host/v", ["recover", "{}", "a.dlq"]),
        ("amqp://me:s3/cret@host/v", ["topology", "check", "{}"]),
        ("postgresql://me:s3cret@host/v", ["recover", "a.dlq", "--routes", "{}"]),
        ("amqp://me:s3/cret@host/v", ["letters", "edit", "1", "--body-file", "{}"]),
    ],
)
def test_a_failure_shows_no_password_of_a_url(run: Command, url: str, arguments: list[str]) -> None:
    given = [url if argument == "{}" else argument for argument in arguments]
    variables: dict[str, Any] = {} if url in given else {"HOLDFAST_URL": url}
    ended = run(*given, **variables)
    assert (ended.code in (1, 2), ended.stderr.count("\n")) == (True, 1), ended
    assert "cret" not in ended.stderr


@pytest.mark.parametrize(
    "arguments", [["queue", "list"], ["config", "show"], ["serve", "--listen", "127.0.0.1:0"], ["ledger", "verify"]]
)
@pytest.mark.parametrize("variable", ["URL", "VAULT", "BROKER", "MANAGEMENT", "VAULT_BLOBS"])
def test_a_password_that_is_not_escaped_is_in_no_output(run: Command, variable: str, arguments: list[str]) -> None:
    scheme = {"BROKER": "amqp", "MANAGEMENT": "http", "VAULT_BLOBS": "s3"}.get(variable, "postgresql")
    (run.folder / "holdfast.toml").write_text('dead_queues = "*.dlq"', "utf-8")
    if arguments[0] == "serve" and variable == "MANAGEMENT":
        return  # it is asked when somebody wants to know something
    variables: dict[str, Any] = {f"HOLDFAST_{variable}": f"{scheme}://me:12/s3cret@host:1/place"}
    ended = run(*arguments, **variables)
    assert not any(part in ended.text + ended.stderr for part in ("12/", "'12'", "s3cret", ":12"))
