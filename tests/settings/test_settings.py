"""Settings come from four sources, are checked once, say what is wrong, and give no secret away."""

from __future__ import annotations

import grp
import os
import pwd
import re
from pathlib import Path

import pytest

from holdfast.errors import CannotStart
from holdfast.settings import (
    ListenAddress,
    Settings,
    StorageSettings,
    _has_others,
    explain,
    load_settings,
    masked,
    parse_address,
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(toml: str = "", *, env: dict[str, str] | None = None, serving: bool = True, **arguments: object) -> Settings:
    if toml:
        Path("holdfast.toml").write_text(toml, "utf-8")
    return load_settings(arguments, environment=env or {}, serving=serving)


def refused(toml: str = "", *, env: dict[str, str] | None = None, **arguments: object) -> str:
    with pytest.raises(CannotStart) as refusal:
        load(toml, env=env, serving=True, **arguments)
    return refusal.value.message


def test_nothing_given_is_the_embedded_default() -> None:
    settings = load()
    assert [(s.name, s.url, s.affinity) for s in settings.storages] == [("default", "sqlite:///holdfast-data", 1.0)]
    assert settings.address == ListenAddress("127.0.0.1", 8470)
    assert settings.admin_token_file == Path("holdfast-data/admin-token")
    assert (settings.auth, settings.admin_token, settings.insecure_http) == ("token", None, False)
    assert (settings.produce_body_bytes_max, settings.import_body_bytes_max, settings.other_body_bytes_max) == (
        5_000_000,
        64_000_000,
        512_000,
    )


def test_arguments_beat_environment_beats_file_beats_default() -> None:
    toml = 'listen = "127.0.0.1:1"\nopen_files_max = 1\nlog_level = "error"'
    env = {"HOLDFAST_LISTEN": "127.0.0.1:2", "HOLDFAST_OPEN_FILES_MAX": "2"}
    settings = load(toml, env=env, listen="127.0.0.1:3", open_files_max=None)
    assert (settings.listen, settings.open_files_max, settings.log_level) == ("127.0.0.1:3", 2, "error")
    assert settings.log_format == "json"
    assert settings.sources["listen"] == "argument --listen"
    assert settings.sources["open_files_max"] == "environment HOLDFAST_OPEN_FILES_MAX"
    assert settings.sources["log_level"] == "holdfast.toml"
    assert settings.sources["log_format"] == "default"


def test_a_url_stands_in_for_the_storages_of_a_weaker_source() -> None:
    toml = '[[storages]]\nname = "a"\nurl = "sqlite:///a"\n[[storages]]\nname = "b"\nurl = "memory://"\naffinity = 2'
    assert [(s.name, s.affinity) for s in load(toml).storages] == [("a", 1.0), ("b", 2.0)]
    settings = load(env={"HOLDFAST_URL": "sqlite:///c"})
    assert [(s.name, s.url) for s in settings.storages] == [("default", "sqlite:///c")]


def test_names_with_commas_may_be_a_list_in_a_file() -> None:
    settings = load('dead_queues = ["*.dlq", "graves"]\ncapture = ["orders.dlq"]')
    assert (settings.dead_queues, settings.capture) == ("*.dlq,graves", "orders.dlq")
    assert load('dead_queues = "*.dlq"').dead_queues == "*.dlq"
    assert "'dead_queues'" in refused('dead_queues = ["a,b"]')
    assert "'dead_queues'" in refused("dead_queues = [1]")


def test_a_file_can_be_named(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("open_files_max = 7", "utf-8")
    assert load(env={"HOLDFAST_CONFIG": str(other)}).open_files_max == 7
    assert load_settings(environment={}, file=other).open_files_max == 7
    assert "nowhere.toml: No such file" in refused(env={"HOLDFAST_CONFIG": "nowhere.toml"})


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("listn = 1", "holdfast.toml has 'listn', did you mean 'listen'?"),
        ("zebra = 1", "holdfast.toml has 'zebra', known are url, storages, listen"),
        ("listen = 1", "'listen' '1' (holdfast.toml): expected a text"),
        ("open_files_max = 1.5", "'open_files_max' '1.5' (holdfast.toml): expected a whole number"),
        ("open_files_max = 0", "expected a whole number >= 1"),
        ("insecure_http = 1", "expected true or false"),
        ('auth = "no"', "'auth' 'no' (holdfast.toml): use one of token, none"),
        ('data_folder = ""', "'data_folder'"),
        ('admin_token = "secret"', "set HOLDFAST_ADMIN_TOKEN in the environment"),
        ("listen = ", "holdfast.toml is not TOML: Invalid value"),
        ('url = "memory://"\nstorages = []', "has 'url' and 'storages', keep one of them"),
        ("storages = []", "the list is empty"),
        ('[[storages]]\nname = "a"', "the required field 'url' in storages[0]"),
        ('[[storages]]\nname = "a"\nurl = "x"\nafinity = 1', "'afinity' in [[storages]], did you mean 'affinity'?"),
        ('[[storages]]\nname = "a"\nurl = "x"\naffinity = nan', "expected a number"),
        ('[[storages]]\nname = "a"\nurl = "x"\naffinity = -1', "expected a number"),
        ('[[storages]]\nname = "a"\nurl = "x"\naffinity = 0', "every affinity is 0"),
        ('storages = [{name = "a", url = "x"}, {name = "a", url = "y"}]', "name 'a' is used twice"),
        ('storages = [{name = "a", url = "x"}, {name = "b", url = "x"}]', "url 'x' is used twice"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_what_to_do(toml: str, text: str) -> None:
    assert text in refused(toml)


def test_a_file_that_is_not_text_is_refused() -> None:
    Path("holdfast.toml").write_bytes(b'listen = "\xff"')
    assert "holdfast.toml is not UTF-8 at byte 10" in refused()


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"HOLDFAST_LISTN": "x"}, "HOLDFAST_LISTN, did you mean HOLDFAST_LISTEN?"),
        ({"HOLDFAST_STORAGES": "x"}, "use [[storages]] in a file"),
        ({"HOLDFAST_OPEN_FILES_MAX": "many"}, "'open_files_max' 'many' (environment HOLDFAST_OPEN_FILES_MAX)"),
        ({"HOLDFAST_INSECURE_HTTP": "perhaps"}, "expected true or false"),
    ],
)
def test_a_mistake_in_the_environment_is_named(env: dict[str, str], text: str) -> None:
    assert text in refused(env=env)


def test_variables_that_are_none_of_ours_are_let_be() -> None:
    load(env={"HOLDFAST_PORT": "tcp://10.0.0.1:8470", "HOLDFAST_SERVICE_HOST": "10.0.0.1", "HOLDFAST_TOKEN": "x"})


def test_an_empty_variable_is_not_set() -> None:
    assert load(env={"HOLDFAST_LISTEN": ""}).sources["listen"] == "default"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8470", ("127.0.0.1", 8470)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:80", ("::1", 80)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
    ],
)
def test_an_address_is_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert str(parse_address(text)) == text


@pytest.mark.parametrize("text", ["", "8470", ":8470", "::1", "::1:80", "localhost", "h:-1", "h:65536", "h:٣", "[]:1"])
def test_an_address_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(CannotStart, match="listen address is invalid"):
        parse_address(text)


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "[::ffff:127.0.0.1]:1"])
def test_on_loopback_everything_is_allowed(listen: str) -> None:
    assert load(listen=listen, auth="none").address.is_loopback


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "192.168.0.1:1", "example.org:1", "localhost.example:1"])
def test_an_open_door_is_refused_unless_it_is_wanted(listen: str) -> None:
    assert "listen on 127.0.0.1 or use auth = token" in refused(listen=listen, auth="none", insecure_http=True)
    assert "--tls-cert and --tls-key, or --insecure-http" in refused(listen=listen)
    assert load(listen=listen, insecure_http=True).insecure_http


def test_tls_needs_both_of_its_files(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.touch()
    assert "tls_key is missing" in refused(tls_cert=cert)
    assert "tls_cert is missing" in refused(tls_key=key)
    assert f"tls_key '{key}' cannot be read" in refused(tls_cert=cert, tls_key=key)
    key.touch()
    assert "give a pair that belongs together" in refused(tls_cert=cert, tls_key=key)


def test_a_server_needs_a_storage_and_a_client_may_name_a_server() -> None:
    assert "use --url sqlite:///FOLDER" in refused(url="http://u:secret@127.0.0.1:8470")
    assert load(url="http://127.0.0.1:8470", serving=False).storages[0].url == "http://127.0.0.1:8470"


@pytest.mark.parametrize("url", ["http://[::1", "postgresql://me:s3cret@db:port/q"])
def test_a_url_that_cannot_be_read_is_refused_without_showing_it(url: str) -> None:
    text = "storage URL is invalid; the one of 'default' (argument --url): it cannot be read"
    assert refused(url=url).startswith(text)
    assert masked(url) == "***"


#: A password that ends the login too early, each with a scheme that takes one.
UNESCAPED = [
    f"{scheme}://me:{password}@host:1234/place"
    for scheme in ("postgresql", "amqp", "http")
    for password in ("12/s3cret", "12?s3cret", "12#s3cret", "s3/cret", "/s3cret", "12/s3@cret", "s3cret@12/s3cret")
]


@pytest.mark.parametrize("url", [*UNESCAPED, "//me:s3cret@host", "host=h password=s3cret", "s3://key:s3cret@bucket/a"])
def test_a_password_that_is_not_escaped_is_not_shown(url: str) -> None:
    assert not {"s3", "12", "cret"} & set(re.split(r"\W+", masked(url)[3:]))
    if "://" in url:
        assert "s3cret" not in str(explain(Settings(blobs=url, vault_blobs=url)))


@pytest.mark.parametrize(
    "url",
    [
        "amqp:/me:s3cret@host",
        "me:s3cret@host:5672",
        "host=h password=s3cret",
        "postgresql://host/db?user=me;password=s3cret",
        "s3://bucket/a?secret_access_key=s3cret&region=here",
        "az://place?sig=s3cret",
        "https://host/?auth_token=s3cret",
    ],
)
def test_a_password_is_not_shown_wherever_it_stands(url: str) -> None:
    assert "s3cret" not in str(explain(Settings(blobs=url, vault_blobs=url)))
    assert "s3cret" not in repr(StorageSettings(name="a", url=url))


@pytest.mark.parametrize("folder", ["data@here", "/srv/a:b", "data/pass"])
def test_a_folder_is_shown_as_it_is(folder: str) -> None:
    assert folder in str(explain(Settings(blobs=folder)))


@pytest.mark.parametrize("url", UNESCAPED[:3])
def test_a_password_that_is_not_escaped_is_refused(url: str) -> None:
    text = refused(url=url)
    assert "write these as %2F, %3F and %23" in text
    assert "12" not in text
    assert "s3cret" not in text
    assert load(url=url.replace("12/", "12%2F").replace("12?", "12%3F").replace("12#", "12%23")).storages


def test_several_hosts_are_clear() -> None:
    assert load(url="postgresql://me:s3cret@one:1,two:2/place").storages
    assert masked("postgresql://me:s3cret@one:1,two:2/place") == "postgresql://me:***@one:1,two:2/place"


def test_no_secret_is_ever_shown() -> None:
    env = {
        "HOLDFAST_ADMIN_TOKEN": "s3cret",
        "HOLDFAST_URL": "postgresql://me:s3cret@db:5432/q?sslpassword=s3cret&application_name=a",
    }
    settings = load(env=env)
    assert settings.admin_token is not None
    assert settings.admin_token.reveal() == "s3cret"
    assert "s3cret" not in repr(settings) + str(explain(settings))
    storages = explain(settings)[0].value
    assert storages == "default = postgresql://me:***@db:5432/q?sslpassword=***&application_name=a (affinity 1)"
    assert "s3cret" not in refused(url="http://me:s3cret@h", env=env)


@pytest.mark.parametrize("url", ["sqlite:///a b%20c", "memory://", "postgresql://me@db/q?x=1", "postgresql:///q"])
def test_a_url_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert masked(url) == url


def test_everything_is_explained() -> None:
    explained = explain(load())
    assert {row.key for row in explained} == set(Settings.__struct_fields__) - {"sources", "found_code"}
    assert all(row.meaning and row.value and row.source == "default" for row in explained)


def test_recoveries_are_named_by_their_queue_and_hide_their_broker() -> None:
    toml = '[recover."a.dlq"]\non_start = true\nevery = "10m"\nurl = "amqp://u:secret@h/"\nrate = 20\n[recover.b]'
    settings = load(toml)
    entry = settings.recover["a.dlq"]
    assert (entry.on_start, entry.every, entry.rate, entry.to, entry.total_timeout) == (
        True,
        "10m",
        20,
        "routes",
        "30m",
    )
    assert entry.url is not None
    assert entry.url.reveal() == "amqp://u:secret@h/"
    (explained,) = [one for one in explain(settings) if one.key == "recover"]
    assert explained.value == "a.dlq: on_start = true, every = 10m, url = ***, rate = 20.0\nb: off"
    assert explained.plain == {"a.dlq": {"on_start": True, "every": "10m", "url": "***", "rate": 20.0}, "b": {}}
    assert "secret" not in repr(settings)
    assert [one.value for one in explain(Settings()) if one.key == "recover"] == ["(none)"]


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        (
            "[recover.q]\nevry = '1s'",
            "setting is unknown; holdfast.toml has 'evry' in [recover.\"q\"], did you mean 'every'?",
        ),
        ("[recover.q]\nevery = 'often'", 'recover is invalid; [recover."q"]: every is invalid'),
        ("[recover.q]\nevery = '10ms'", 'recover is invalid; [recover."q"] has every = 10ms, 1s is the least'),
        ("[recover.q]\nurl = 'http://x'", 'recover is invalid; the url of [recover."q"] is none of amqp://'),
        (
            "[recover.q]\nto = 'moon'",
            "setting is invalid; 'recover' (holdfast.toml): invalid enum value 'moon' in recover",
        ),
        ("recover = 1", "setting is invalid; 'recover' '1' (holdfast.toml): "),
    ],
)
def test_a_mistake_in_a_recovery_is_named(toml: str, text: str) -> None:
    assert refused(toml).startswith(text)


def test_a_recovery_cannot_be_a_variable() -> None:
    assert refused(env={"HOLDFAST_RECOVER": "x"}).endswith('use [recover."NAME"] in a file')


@pytest.mark.parametrize("key", ["first_byte_timeout", "headers_timeout", "body_timeout", "idle_timeout"])
def test_a_time_limit_of_a_connection_is_a_duration_of_a_second_at_least(key: str) -> None:
    assert f"{key} (environment HOLDFAST_{key.upper()})" in refused(env={f"HOLDFAST_{key.upper()}": "soon"})
    assert refused(f'{key} = "10ms"').endswith(f"{key} (holdfast.toml) is 10ms, 1s is the least")
    assert load(f'{key} = "1m"') is not None


# --- a file that lay there -----------------------------------------------------------------------------------------


def given_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To somebody who is neither we nor root."""
    if os.geteuid() == 0:
        os.chown(path, 54_321, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54_321)


def test_a_file_of_somebody_else_is_refused_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("holdfast.toml")
    path.write_text('url = "http://elsewhere:8470"', "utf-8")
    given_away(path, monkeypatch)
    text = refused()
    assert text.startswith("configuration is refused; ./holdfast.toml belongs to ")
    assert text.endswith("look into it, and name it with --config if it is right")
    assert load(serving=False, env={"HOLDFAST_CONFIG": "holdfast.toml"}).storages[0].url == "http://elsewhere:8470"
    assert load_settings(environment={}, file=path, serving=False).storages[0].url == "http://elsewhere:8470"


def test_a_pipe_that_lies_there_is_refused_and_not_waited_for() -> None:
    os.mkfifo("holdfast.toml")
    assert refused() == "configuration is refused; ./holdfast.toml is no file"


def test_a_link_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("ours.toml").write_text("open_files_max = 7", "utf-8")
    Path("holdfast.toml").symlink_to("ours.toml")
    assert load().open_files_max == 7
    given_away(Path("holdfast.toml"), monkeypatch)
    assert "belongs to" in refused()


@pytest.mark.parametrize(
    ("mode", "others", "why"),
    [
        (0o600, True, ""),
        (0o644, True, ""),
        (0o664, False, ""),
        (0o664, True, "a group with other members may write it"),
        (0o646, False, "everybody may write it"),
        (0o666, True, "everybody may write it"),
    ],
)
def test_a_file_that_others_may_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, mode: int, others: bool, why: str
) -> None:
    monkeypatch.setattr("holdfast.settings._has_others", lambda _: others)
    path = Path("holdfast.toml")
    path.write_text("open_files_max = 7", "utf-8")
    path.chmod(mode)
    if why:
        assert why in refused()
    else:
        assert load().open_files_max == 7
    assert load_settings(environment={}, file=path).open_files_max == 7


def test_a_group_has_others_by_name_or_as_their_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    me, other = pwd.getpwuid(os.geteuid()), pwd.struct_passwd(("other", "x", 54_321, 77, "", "", ""))
    monkeypatch.setattr(pwd, "getpwall", lambda: [me, other])
    members: dict[int, list[str]] = {76: ["other"], 77: [], 78: [me.pw_name], 79: []}
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("g", "x", gid, members[gid])))
    assert [_has_others(gid) for gid in members] == [True, True, False, False]
