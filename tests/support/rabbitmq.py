"""Private RabbitMQ nodes for the tests: own ports on loopback, own data in a temporary folder, own epmd.

Debian 12's package is 3.10. Newer versions run from a debootstrap folder (`scripts/rabbitmq.sh`), in a mount namespace
of their own, so that nothing stays mounted. A node is ended by its process id. One node per run and version, one
virtual host per test; a test that kills or blocks a node makes its own, whose data are on the disk. Those of the others
are in memory: they are never started again, and each virtual host would wait for the disk a dozen times.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from urllib.parse import quote

import httpx2
import pytest

from tests.support.certificates import Certificates
from tests.support.ports import free_ports
from tests.support.servers import Guard

INSTALL = "sudo apt-get install rabbitmq-server openssl"
READY_TIMEOUT_S = 90.0
END_TIMEOUT_S = 60.0
STEP_S = 0.05
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


class Node:
    """One broker with its data. `stop`, `kill`, `pause` and `start` again are for fault tests; `close` is final."""

    def __init__(
        self,
        version: str,
        *,
        plugins: tuple[str, ...] = (),
        epmd_of: Node | None = None,
        memory: Path | None = None,
    ) -> None:
        """`epmd_of`: another node of the same cluster, whose name service this one uses. `memory`: where data that are
        not on the disk are."""
        self.version = version
        suite = VERSIONS[version]
        self._root = cache_folder() / f"rabbitmq-{suite}" if suite else Path("/")
        self.folder = Path(mkdtemp(prefix="holdfast-rmq-", dir=memory or self._root / "tmp"))
        self._inside = self.folder if memory else Path("/") / self.folder.relative_to(self._root)
        self.port, self.tls_port, self.management_port, self._epmd_port, self._dist_port = free_ports(5)
        self.certificates = Certificates(self.folder / "tls")
        self._plugins = ("rabbitmq_management", "rabbitmq_auth_mechanism_ssl", *plugins)
        self.name = f"hf{self.port}@localhost"
        self._own_epmd = epmd_of is None
        if epmd_of is not None:
            self._epmd_port = epmd_of._epmd_port
        self._epmd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        # One for all its calls: to read whom to trust takes 30 ms, and nobody speaks TLS here.
        self._http = httpx2.Client(base_url=f"{self.management_url}/api", timeout=30.0, verify=False, trust_env=False)

    @classmethod
    def create(cls, version: str = "3.10", *, plugins: tuple[str, ...] = (), memory: Path | None = None) -> Node:
        """Make a node and start it. Without a server it fails the test and says what to install."""
        check_installed(version)
        node = cls(version, plugins=plugins, memory=memory)
        try:
            node.configure()
            node.start()
        except BaseException:
            node.close()
            raise
        return node

    @property
    def pid(self) -> int | None:
        """The process id of the broker itself, or None when it is down."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.folder / "pid").read_text())
            return pid if _lives(pid) else None
        return None

    def url(self, vhost: str = "/", *, user: str = "guest:guest", port: int | None = None, more: str = "") -> str:
        """The address. `port` is for a proxy in front of it, `more` for the query."""
        return f"amqp://{user}@127.0.0.1:{port or self.port}/{quote(vhost, safe='')}{more}"

    def tls_url(self, vhost: str = "/", *, user: str = "guest:guest", more: str = "") -> str:
        """The address over TLS; the certificate is for `localhost`, and its authority is the node's own."""
        query = f"?cacertfile={self.certificates.ca}{more}"
        return f"amqps://{user}@localhost:{self.tls_port}/{quote(vhost, safe='')}{query}"

    @property
    def management_url(self) -> str:
        """The address of the management API, with its login."""
        return f"http://guest:guest@127.0.0.1:{self.management_port}"

    def start(self) -> None:
        """Start the broker (again) and wait until it answers. Nothing happens when it runs."""
        if not self.pid:
            self.launch()
            self.wait_ready()

    def launch(self) -> None:
        """Start the broker without waiting: nodes of a cluster wait for one another."""
        self._start_epmd()
        (self.folder / "pid").unlink(missing_ok=True)
        with (self.folder / "out").open("ab") as log:
            self._server = subprocess.Popen(
                self._command("rabbitmq-server"),
                env=self._environment(server=True),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if self._guard is not None:
            self._guard.close()
        self._guard = Guard(self.folder, self._server.pid, *([self._epmd.pid] if self._epmd else []))

    def stop(self) -> None:
        """An orderly stop."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: what a crash does. The data stay, for `start`."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: it holds its connections and answers nothing, until `resume`."""
        os.kill(self.pid or 0, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid or 0, signal.SIGCONT)

    def close(self) -> None:
        """End everything and remove the data."""
        self._http.close()
        self.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(END_TIMEOUT_S)
        if self._guard is not None:
            self._guard.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ctl(self, *arguments: str) -> str:
        """`rabbitmqctl`; half a second each."""
        command = self._command("rabbitmqctl", "--quiet", *arguments)
        done = subprocess.run(
            command, env=self._environment(server=False), capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode != 0:
            raise RuntimeError(f"rabbitmqctl {' '.join(arguments)} failed\n{done.stdout}\n{done.stderr}")
        return done.stdout

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
        self.ctl("set_vm_memory_high_watermark", "0.000001")
        try:
            yield
        finally:
            self.ctl("set_vm_memory_high_watermark", "0.4")

    @contextmanager
    def consumer_timeout(self, timeout_ms: int) -> Iterator[None]:
        """Consumers that hold a message for longer are ended; for channels and queues made in the block."""
        self.ctl("eval", f"application:set_env(rabbit, consumer_timeout, {timeout_ms}).")
        try:
            yield
        finally:
            self.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1800000).")

    def log(self) -> str:
        """The end of its logs, for an error's text."""
        files = [self.folder / "out", *(self.folder / "log").glob("*.log")]
        return "\n".join(file.read_text("utf-8", "replace")[-3000:] for file in files if file.exists())

    def configure(self, more: str = "") -> None:
        """Write its files, before the first start; `more` goes into rabbitmq.conf."""
        self.certificates.make()
        ports = {"port": self.port, "tls_port": self.tls_port, "management_port": self.management_port}
        (self.folder / "rabbitmq.conf").write_text(CONFIGURATION.format(folder=self._inside, **ports) + more)
        (self.folder / "advanced.config").write_text(ADVANCED)
        (self.folder / "enabled_plugins").write_text(f"[{','.join(self._plugins)}].")
        (self.folder / "home").mkdir()
        cookie = self.folder / "home" / ".erlang.cookie"
        cookie.write_text("holdfast")
        cookie.chmod(0o400)

    def _command(self, program: str, *arguments: str) -> list[str]:
        command = [f"{BINARIES}/{program}", *arguments]
        enter = [] if self._root == Path("/") else ["unshare", "--mount", "sh", "-c", ENTER, str(self._root)]
        return [*enter, *command]

    def _environment(self, *, server: bool) -> dict[str, str]:
        inside = self._inside
        environment = {
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
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        if server:
            environment["RABBITMQ_DIST_PORT"] = str(self._dist_port)
            # Without this the port between nodes listens on every interface.
            environment["RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"] = "-kernel inet_dist_use_interface {127,0,0,1}"
        return environment

    def _start_epmd(self) -> None:
        """In the foreground, so that it can be ended; else the broker makes one that outlives everything."""
        if self._own_epmd and (self._epmd is None or self._epmd.poll() is not None):
            self._epmd = subprocess.Popen(
                ["epmd", "-port", str(self._epmd_port), "-address", "127.0.0.1"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Until it answers on AMQP and on its management API."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._server is not None and self._server.poll() is not None:
                raise RuntimeError(f"RabbitMQ {self.version} ended at its start\n{self.log()}")
            with contextlib.suppress(OSError, httpx2.HTTPError):
                self.api("GET", "/overview")
                self.api("GET", "/vhosts/%2F")
                if self._greets():
                    return
            time.sleep(STEP_S)
        raise RuntimeError(f"RabbitMQ {self.version} was not ready after {READY_TIMEOUT_S} s\n{self.log()}")

    def _greets(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 5.0) as probe:
            probe.sendall(b"AMQP\0\0\x09\x01")
            return probe.recv(1) == b"\1"

    def _end(self, number: signal.Signals) -> None:
        pid = self.pid
        if pid is not None:
            os.kill(pid, number)
            if number is not signal.SIGKILL:
                os.kill(pid, signal.SIGCONT)
        if self._server is not None:
            if pid is None and self._server.poll() is None:
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait(END_TIMEOUT_S)
            self._server = None
        deadline = time.monotonic() + END_TIMEOUT_S
        while pid is not None and _lives(pid):
            if time.monotonic() > deadline:
                raise RuntimeError(f"RabbitMQ {self.version} outlived {number.name}")
            time.sleep(STEP_S)


def cache_folder() -> Path:
    """Where the debootstrap folders are kept."""
    return Path(os.environ.get("HOLDFAST_CACHE") or Path.home() / ".cache" / "holdfast")


def required() -> frozenset[str]:
    """The versions that must not be missing. A name that is no version is an error."""
    names = frozenset(name.strip() for name in os.environ.get(REQUIRED, "").split(",") if name.strip())
    if unknown := names - set(VERSIONS):
        raise pytest.UsageError(f"{REQUIRED}: no such version: {', '.join(sorted(unknown))}")
    return names


def versions() -> list[str]:
    """Those that the tests run on."""
    return [version for version in VERSIONS if version in EVERYDAY | required()]


def check_installed(version: str) -> None:
    """Fail the test, with what to do, unless this version can be started; skip it when nobody insists."""
    suite = VERSIONS[version]
    server = Path(f"{BINARIES}/rabbitmq-server")
    if not server.exists() or not shutil.which("epmd") or not shutil.which("openssl"):
        pytest.fail(
            f"these tests need a RabbitMQ server. Install it:  {INSTALL}\n"
            "or leave them out:  HOLDFAST_TEST_WITHOUT=rabbitmq",
            pytrace=False,
        )
    if suite is None or (cache_folder() / f"rabbitmq-{suite}" / str(server).lstrip("/")).exists():
        return
    text = f"RabbitMQ {version} is not there. Make it, as root:  bash scripts/rabbitmq.sh {suite}"
    if version in required():
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


def vhost_name(test_name: str) -> str:
    """A virtual host's name for a test."""
    return "test-" + re.sub(r"[^a-z0-9]+", "-", test_name.lower())[-80:]


def _lives(pid: int) -> bool:
    """A zombie does not live: nobody may be there to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def running_node(version: str = "3.10", *, plugins: tuple[str, ...] = (), memory: Path | None = None) -> Iterator[Node]:
    """A node of one's own, for a test that kills or blocks it; on the disk, unless it is told where in memory."""
    node = Node.create(version, plugins=plugins, memory=memory)
    try:
        yield node
    finally:
        node.close()
