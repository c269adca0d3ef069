"""Private RabbitMQ nodes for the tests: own ports on loopback, own data in a temporary folder, own epmd.

Debian 12's package is 3.10. Newer versions run from a debootstrap folder (`scripts/rabbitmq.sh`), in a mount namespace
of their own, so that nothing stays mounted. A node is ended by its process id. One node per run and version, one
virtual host per test; a test that kills or blocks a node makes its own, whose data are on the disk. Those of the others
are in memory: they are never started again, and each virtual host would wait for the disk a dozen times.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from urllib.parse import quote

import httpx2
import pytest

from tests.support.ports import free_ports
from tests.support.servers import END_TIMEOUT_S, Server, fail_without, is_alive, launch, named, run_tool

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
AUTHORITY = "keyUsage=critical,keyCertSign,cRLSign"
BY_CA = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
INSTALL = "sudo apt-get install rabbitmq-server openssl"
BINARIES = os.environ.get("HOLDFAST_TEST_RABBITMQ_BIN", "/usr/lib/rabbitmq/bin")
VERSIONS = {"3.10": None, "4.0": "trixie", "4.3": "sid"}
#: Versions that must be there, comma-separated. Those of EVERYDAY run anyway where they are there, others only then.
REQUIRED = "HOLDFAST_TEST_RABBITMQ"
EVERYDAY = frozenset({"3.10", "4.0"})

CONFIGURATION = """
listeners.tcp.local = 127.0.0.1:{port}
listeners.ssl.local = 127.0.0.1:{tls_port}
ssl_options.cacertfile = {folder}/tls/ca.pem
ssl_options.certfile = {folder}/tls/server.pem
ssl_options.keyfile = {folder}/tls/server.key
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = false
ssl_cert_login_from = common_name
auth_mechanisms.1 = PLAIN
auth_mechanisms.2 = EXTERNAL
management.tcp.ip = 127.0.0.1
management.tcp.port = {management_port}
"""
#: Goes into a debootstrap folder, which has its own processes and our memory.
ENTER = 'mount -t proc proc "$0/proc" && mount --bind /dev/shm "$0/dev/shm" && exec chroot "$0" "$@"'
# How often a channel looks for consumers that are too slow (a minute by default), and after how long a quorum queue
# sends a dead letter again that was not taken (three minutes): no test waits for that.
ADVANCED = "[{rabbit, [{channel_tick_interval, 500}, {dead_letter_worker_publisher_confirm_timeout, 1000}]}].\n"


def make_certificates(folder: Path) -> None:
    """An authority, a server for `localhost`, a client named `guest`, and a stranger; a tenth of a second.

    The keys are worthless outside the test.
    """
    folder.mkdir()
    for name, subject, *more in (
        ("ca", "holdfast test authority", AUTHORITY),
        ("stranger", "somebody else", AUTHORITY),
        ("server", "localhost", "subjectAltName=DNS:localhost", *BY_CA),
        ("client", "guest", "extendedKeyUsage=clientAuth", *BY_CA),
    ):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        run_tool(("openssl", "req", "-x509", "-subj", f"/CN={subject}", *KEY, *files, "-addext", *more), cwd=folder)


class Node(Server):
    """One broker with its data. On the disk, unless it is told where in memory."""

    def __init__(
        self,
        version: str = "3.10",
        *,
        plugins: tuple[str, ...] = (),
        epmd_of: Node | None = None,
        memory: Path | None = None,
    ) -> None:
        """`epmd_of`: another node of the same cluster, whose name service this one uses."""
        check_installed(version)
        self.version = version
        suite = VERSIONS[version]
        self._root = cache_folder() / f"rabbitmq-{suite}" if suite else Path("/")
        super().__init__(Path(mkdtemp(prefix="holdfast-rmq-", dir=memory or self._root / "tmp")))
        self._inside = self.folder if memory else Path("/") / self.folder.relative_to(self._root)
        self.port, self.tls_port, self.management_port, self._epmd_port, self._dist_port = free_ports(5)
        self.certificates = self.folder / "tls"
        self._plugins = ("rabbitmq_management", "rabbitmq_auth_mechanism_ssl", *plugins)
        self.name = f"hf{self.port}@localhost"
        self._own_epmd = epmd_of is None
        if epmd_of is not None:
            self._epmd_port = epmd_of._epmd_port
        self._epmd: subprocess.Popen[bytes] | None = None
        # One for all its calls: to read whom to trust takes 30 ms, and nobody speaks TLS here.
        self._http = httpx2.Client(base_url=f"{self.management_url}/api", timeout=60.0, verify=False, trust_env=False)

    def __str__(self) -> str:
        return f"RabbitMQ {self.version}"

    @property
    def pid(self) -> int | None:
        """The process id of the broker itself, or None when it is down."""
        with suppress(OSError, ValueError):
            pid = int((self.folder / "pid").read_text())
            return pid if is_alive(pid) else None
        return None

    def url(self, vhost: str = "/", *, user: str = "guest:guest", port: int | None = None, more: str = "") -> str:
        """The address. `port` is for a proxy in front of it, `more` for the query."""
        return f"amqp://{user}@127.0.0.1:{port or self.port}/{quote(vhost, safe='')}{more}"

    def tls_url(self, *, user: str = "guest:guest", more: str = "") -> str:
        """The address over TLS; the certificate is for `localhost`, and its authority is the node's own."""
        return f"amqps://{user}@localhost:{self.tls_port}/%2F?cacertfile={self.certificates}/ca.pem{more}"

    @property
    def management_url(self) -> str:
        """The address of the management API, with its login."""
        return f"http://guest:guest@127.0.0.1:{self.management_port}"

    def launch(self) -> None:
        if not (self.folder / "rabbitmq.conf").exists():
            self.configure()
        self._start_epmd()
        (self.folder / "pid").unlink(missing_ok=True)
        beside = [self._epmd.pid] if self._epmd else []
        self._run(self._command("rabbitmq-server"), beside=beside, env=self._environment())

    def is_ready(self) -> bool:
        """Whether it answers on AMQP and on its management API."""
        self.api("GET", "/overview")
        self.api("GET", "/vhosts/%2F")
        with socket.create_connection(("127.0.0.1", self.port), 5.0) as probe:
            probe.sendall(b"AMQP\0\0\x09\x01")
            return probe.recv(1) == b"\1"

    def close(self) -> None:
        self._http.close()
        self.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(END_TIMEOUT_S)
        super().close()

    def ctl(self, *arguments: str) -> str:
        """`rabbitmqctl`; half a second each."""
        return run_tool(self._command("rabbitmqctl", "--quiet", *arguments), env=self._environment())

    def api(self, method: str, path: str, body: object = None) -> httpx2.Response:
        """One call of the management API; raises for any answer but 2xx."""
        answer = self._http.request(method, path, json=body)
        answer.raise_for_status()
        return answer

    def create_vhost(self, name: str) -> None:
        """A new, empty virtual host that `guest` may use."""
        self.api("PUT", f"/vhosts/{quote(name, safe='')}")
        self.api("PUT", f"/permissions/{quote(name, safe='')}/guest", {"configure": ".*", "write": ".*", "read": ".*"})

    def delete_vhost(self, name: str) -> None:
        """Everything in it goes as well."""
        self.api("DELETE", f"/vhosts/{quote(name, safe='')}")

    @contextmanager
    def memory_alarm(self) -> Iterator[None]:
        """The broker has no memory left, until the end of the block."""
        with ExitStack() as stack:
            stack.callback(self.ctl, "set_vm_memory_high_watermark", "0.4")
            self.ctl("set_vm_memory_high_watermark", "0.000001")
            yield

    @contextmanager
    def consumer_timeout(self, timeout_ms: int) -> Iterator[None]:
        """Consumers that hold a message for longer are ended; for channels and queues made in the block."""
        with ExitStack() as stack:
            stack.callback(self.ctl, "eval", "application:set_env(rabbit, consumer_timeout, 1800000).")
            self.ctl("eval", f"application:set_env(rabbit, consumer_timeout, {timeout_ms}).")
            yield

    def configure(self, more: str = "") -> None:
        """Write its files, before the first start; `more` goes into rabbitmq.conf."""
        make_certificates(self.certificates)
        ports = {"port": self.port, "tls_port": self.tls_port, "management_port": self.management_port}
        (self.folder / "rabbitmq.conf").write_text(CONFIGURATION.format(folder=self._inside, **ports) + more)
        (self.folder / "advanced.config").write_text(ADVANCED)
        (self.folder / "enabled_plugins").write_text(f"[{','.join(self._plugins)}].")
        (self.folder / "home").mkdir()
        cookie = self.folder / "home" / ".erlang.cookie"
        cookie.write_text("holdfast")
        cookie.chmod(0o400)

    def _command(self, program: str, *arguments: str) -> list[str]:
        enter = [] if self._root == Path("/") else ["unshare", "--mount", "sh", "-c", ENTER, str(self._root)]
        return [*enter, f"{BINARIES}/{program}", *arguments]

    def _environment(self) -> dict[str, str]:
        inside = self._inside
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": f"{inside}/home",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_MNESIA_BASE": f"{inside}/data",
            "RABBITMQ_LOG_BASE": f"{inside}/log",
            "RABBITMQ_CONFIG_FILE": f"{inside}/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{inside}/advanced.config",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{inside}/enabled_plugins",
            "RABBITMQ_PID_FILE": f"{inside}/pid",
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            # Without this the port between nodes listens on every interface.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }

    def _start_epmd(self) -> None:
        """In the foreground, so that it can be ended; else the broker makes one that outlives everything."""
        if self._own_epmd and (self._epmd is None or self._epmd.poll() is not None):
            self._epmd = launch(["epmd", "-port", str(self._epmd_port), "-address", "127.0.0.1"])


def cache_folder() -> Path:
    """Where the debootstrap folders are kept."""
    return Path(os.environ.get("HOLDFAST_CACHE") or Path.home() / ".cache" / "holdfast")


def required() -> frozenset[str]:
    """The versions that must not be missing."""
    return named(REQUIRED, VERSIONS, "version")


def versions() -> list[str]:
    """Those that the tests run on."""
    return [version for version in VERSIONS if version in EVERYDAY | required()]


def check_installed(version: str) -> None:
    """Fail the test, with what to do, unless this version can be started; skip it when nobody insists."""
    suite = VERSIONS[version]
    server = Path(f"{BINARIES}/rabbitmq-server")
    if not server.exists() or not shutil.which("epmd") or not shutil.which("openssl"):
        fail_without("rabbitmq", "RabbitMQ server", INSTALL)
    if suite is None or (cache_folder() / f"rabbitmq-{suite}" / str(server).lstrip("/")).exists():
        return
    text = f"RabbitMQ {version} is not there. Make it, as root:  bash scripts/rabbitmq.sh {suite}"
    if version in required():
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


def vhost_name(test_name: str) -> str:
    """A virtual host's name for a test."""
    return "test-" + re.sub(r"[^a-z0-9]+", "-", test_name.lower())[-80:]
