"""Redis as operators run it, on real servers: by TLS, and behind Sentinel."""

import contextlib
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from e2e.servers import Redis, answers_ping, await_start, program, redis_server, running, wait_until
from tiertune_agent.demo.ports import free_port


@dataclass(frozen=True)
class Certificates:
    """PEM files of a throw-away authority, of a server called ``localhost``, and of a client."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def certificates(folder: Path) -> Certificates:
    """Made by the ``openssl`` command; valid for a day."""
    path = program("openssl")

    def openssl(*arguments: str) -> None:
        subprocess.run([path, *arguments], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority = ("-days", "1", "-subj", "/CN=throw-away", "-addext", "keyUsage=critical,keyCertSign")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", *authority)
    for name in ("server", "client"):
        (folder / f"{name}.ext").write_text("subjectAltName = DNS:localhost\n")
        openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1", "-extfile", f"{name}.ext")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    own = (folder / f"{name}.{kind}" for name in ("server", "client") for kind in ("pem", "key"))
    return Certificates(folder / "ca.pem", *own)


def expire(files: Certificates) -> None:
    """Exchange the server's certificate for one that ended yesterday."""
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-days", "-1", "-extfile", "server.ext")
    command = [program("openssl"), "x509", "-req", "-in", "server.csr", *signed, "-out", files.server.name]
    subprocess.run(command, cwd=files.server.parent, check=True, capture_output=True)


@contextlib.contextmanager
def redis_by_tls(files: Certificates, *, options: Sequence[str] = ()) -> Iterator[int]:
    """The port, on ``localhost``, of a Redis that speaks TLS alone and wants a client's certificate."""
    port = free_port()
    tls = ["--port", "0", "--tls-port", str(port), "--tls-ca-cert-file", str(files.ca), "--tls-auth-clients", "yes"]
    tls += ["--tls-cert-file", str(files.server), "--tls-key-file", str(files.server_key)]
    with redis_server(port=port, options=[*tls, *options], ready=_accepts):
        yield port


@contextlib.contextmanager
def sentinel_by_tls(files: Certificates, master: int, password: str) -> Iterator[int]:
    """The port, on ``localhost``, of a Sentinel by TLS that calls the `redis_by_tls` there ``chunks``."""
    path, port = program("redis-sentinel"), free_port()
    with tempfile.TemporaryDirectory(prefix="tiertune-sentinel-") as folder:
        config, log = Path(folder) / "sentinel.conf", Path(folder) / "sentinel.log"
        config.write_text(
            f"port 0\ntls-port {port}\nbind 127.0.0.1\ndir {folder}\ntls-replication yes\ntls-auth-clients yes\n"
            f"tls-ca-cert-file {files.ca}\ntls-cert-file {files.server}\ntls-key-file {files.server_key}\n"
            "sentinel resolve-hostnames yes\nsentinel announce-hostnames yes\n"
            f"sentinel monitor chunks localhost {master} 1\nsentinel auth-pass chunks {password}\n"
        )
        with running([path, config], log=log) as process:
            await_start(process, log, lambda: _accepts(port))
            yield port


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Watched:
    """A master and its replica, watched by a Sentinel that calls the master ``chunks``."""

    master: Redis
    replica: Redis
    url: str
    """The first Sentinel that it names is not there."""


@contextlib.contextmanager
def redis_watched() -> Iterator[Watched]:
    """Ready when the Sentinel knows the replica, so that it could fail over."""
    path, port = program("redis-sentinel"), free_port()
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(redis_server(options=["--repl-diskless-sync-delay", "0"]))
        replica = stack.enter_context(redis_server(options=["--replicaof", f"127.0.0.1 {master.port}"]))
        wait_until(lambda: _follows(replica.port), "the replica is in step")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiertune-sentinel-")))
        config, log = folder / "sentinel.conf", folder / "sentinel.log"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor chunks 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds chunks 1500\nsentinel failover-timeout chunks 3000\n"
        )
        process = stack.enter_context(running([path, config], log=log))
        await_start(process, log, lambda: answers_ping(port))
        wait_until(lambda: _knows_a_replica(port), "the Sentinel knows a replica in step")
        yield Watched(master, replica, f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/chunks/0")


def _follows(port: int) -> bool:
    with redis.Redis(port=port) as raw:
        return raw.info("replication").get("master_link_status") == "up"


def _knows_a_replica(sentinel: int) -> bool:
    with redis.Redis(port=sentinel, decode_responses=True) as raw:
        return any(one["master-link-status"] == "ok" for one in raw.sentinel_slaves("chunks"))
