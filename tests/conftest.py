"""Real servers for the tests: pion-server, and the redis-server it is compared with; certificates.

A pion-server that logged an error has a defect, whatever the test saw: it fails the test that
stops it.
"""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

START_SECONDS = 20.0
PASSWORD = "s3cret-w0rd"
# Error texts are compared byte for byte, and Redis rewords them between versions.
REFERENCE = "7.0."


@dataclass(frozen=True)
class ServerProcess:
    """A running server; `log` is the file that it writes to."""

    process: subprocess.Popen[bytes]
    host: str
    port: int
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return f"pion://{self.host}:{self.port}"

    @property
    def urls(self) -> dict[str, str]:
        """Every way in, by its name: that of `url`, and those that the log tells of."""
        log = self.log.read_text()
        port = re.search(r"binary lane on port (\d+)", log)
        path = re.search(r"Unix socket (\S+)", log)
        fast = {"fast": f"pion+fast://{self.host}:{port[1]}"} if port else {}
        unix = {"unix": f"pion+unix://{path[1]}"} if path else {}
        return {"resp": self.url, **fast, **unix}

    def stop(self) -> None:
        """SIGTERM, and wait; raises subprocess.TimeoutExpired if it does not end."""
        self.process.terminate()
        try:
            self.process.wait(START_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait()


def spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as sink:
        return subprocess.Popen(command, stdout=sink, stderr=sink)


def wait_for(what: Callable[[], str | None], process: subprocess.Popen[bytes], log: Path) -> str:
    """What `what` returns once that is something; fails if the process ends before."""
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        if found := what():
            return found
        if process.poll() is not None:
            break
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"the server did not start: {log.read_text()}")


def launch_pion(log: Path, *args: str) -> ServerProcess:
    """`pion-server <args>` on a free port, listening."""
    command = [sys.executable, "-m", "pion_server", "--port", "0", *args]
    process = spawn(command, log)

    def port() -> str | None:
        found = re.search(r"listening on \S+:(\d+)", log.read_text())
        return found and found[1]

    return ServerProcess(process, "127.0.0.1", int(wait_for(port, process, log)), log)


def launch_redis(log: Path, *args: str) -> ServerProcess:
    """`redis-server <args>` on a free port, without a disk, answering."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    no_disk = ["--save", "", "--appendonly", "no", "--dir", str(log.parent)]
    options = ["--port", str(port), "--bind", "127.0.0.1", *no_disk, *args]
    process = spawn(["redis-server", *options], log)

    def ready() -> str | None:
        return "yes" if "Ready to accept connections" in log.read_text() else None

    wait_for(ready, process, log)
    return ServerProcess(process, "127.0.0.1", port, log)


def finish_pion(server: ServerProcess) -> None:
    if server.process.poll() is None:
        server.stop()
    log = server.log.read_text()
    assert " ERROR " not in log, log


Launcher = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def pion_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One pion-server for the whole run, with the options' defaults, and a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="pion-") as folder:  # pytest's paths are too long
        path = f"{folder}/socket"
        server = launch_pion(tmp_path_factory.mktemp("pion") / "log", "--unixsocket", path)
        yield server
        finish_pion(server)


@pytest.fixture(scope="session")
def locked_pion(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A pion-server with PASSWORD that logs all it can; PASSWORD must not be there."""
    log = tmp_path_factory.mktemp("locked-pion") / "log"
    server = launch_pion(log, "--requirepass", PASSWORD, "--log-level", "debug")
    yield server
    finish_pion(server)
    assert PASSWORD not in log.read_text()


@pytest.fixture(scope="session")
def watched_pion(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A pion-server with --metrics-port."""
    server = launch_pion(tmp_path_factory.mktemp("watched-pion") / "log", "--metrics-port", "0")
    yield server
    finish_pion(server)


@pytest.fixture(scope="session")
def pion_crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A pion-server with three workers."""
    server = launch_pion(tmp_path_factory.mktemp("pion-crew") / "log", "-w", "3")
    yield server
    finish_pion(server)


@pytest.fixture
def start_pion(tmp_path: Path) -> Iterator[Launcher]:
    """Starts pion-servers with options of their own: start_pion("--requirepass", "x")."""
    servers: list[ServerProcess] = []

    def start(*args: str) -> ServerProcess:
        servers.append(launch_pion(tmp_path / f"pion-{len(servers)}.log", *args))
        return servers[-1]

    yield start
    for server in servers:
        finish_pion(server)


@dataclass(frozen=True)
class Certificates:
    """PEM files: a server's certificate for 127.0.0.1 and localhost, a client's, their authority,
    and one that signed neither."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path
    other_ca: Path

    @property
    def options(self) -> list[str]:
        return ["--tls-cert", str(self.cert), "--tls-key", str(self.key)]

    def trusting(self, ca: Path | None = None) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=ca or self.ca)

    def serving(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.cert, self.key)
        return context


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    made = Certificates(
        *(folder / f"{name}.pem" for name in ("ca", "cert", "key", "client", "client-key", "other"))
    )
    authority = trustme.CA()
    authority.cert_pem.write_to_path(made.ca)
    trustme.CA().cert_pem.write_to_path(made.other_ca)
    server, client = authority.issue_cert("127.0.0.1", "localhost"), authority.issue_cert("me@here")
    for leaf, cert, key in (
        (server, made.cert, made.key),
        (client, made.client_cert, made.client_key),
    ):
        leaf.private_key_pem.write_to_path(key)
        for blob in leaf.cert_chain_pems:
            blob.write_to_path(cert, append=True)
    return made


def require_redis() -> None:
    """Skip, saying why, where the reference is not installed (CI installs it)."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("needs redis-server 7.0 on the PATH (Debian: apt install redis-server)")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    if f"v={REFERENCE}" not in version.stdout:
        pytest.skip(f"the reference is redis-server {REFERENCE}x, found: {version.stdout.strip()}")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One real redis-server 7.0 for the whole run."""
    require_redis()
    server = launch_redis(tmp_path_factory.mktemp("redis") / "log")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def locked_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real redis-server 7.0 with PASSWORD."""
    require_redis()
    log = tmp_path_factory.mktemp("locked-redis") / "log"
    server = launch_redis(log, "--requirepass", PASSWORD)
    yield server
    server.stop()
