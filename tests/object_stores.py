"""Real servers of object stores on this machine, behind a proxy that counts requests and fails.

`tests/conftest.py` makes fixtures of this.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

BUCKET = "corpora"
START_SECONDS = 120
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Request:
    """One request that reached the proxy."""

    method: str
    path: str
    query: dict[str, list[str]]
    range: str | None
    num_bytes: int

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and ("list-type" in self.query or self.path.endswith("/o"))


@dataclass
class Fault:
    """What the proxy does instead of forwarding a request.

    Attributes:
        kind: a status to answer; or "reset" the connection, or say nothing ("hang").
        when: which requests.
        times: how often.
    """

    kind: int | str
    when: Callable[[Request], bool] = lambda request: True
    times: int = 1


@dataclass
class Store:
    """A server with its proxy.

    Attributes:
        url: of a bucket, "s3://corpora".
        environment: for processes that shall use it.
        requests: what reached the proxy since the last `clear`.
        faults: what shall go wrong; used up from the front.
    """

    url: str
    environment: dict[str, str]
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def clear(self) -> None:
        self.requests.clear()
        self.faults.clear()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """The environment of this process points to the store, and its bucket exists."""
        import fsspec

        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            patch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
            fs, _ = fsspec.core.url_to_fs(self.url)
            fs.mkdir(BUCKET)
            yield

    def fresh(self, name: str) -> Store:
        """The same server for a test of that name, with a folder of its own."""
        self.clear()
        folder = re.sub(r"\W+", "-", name).strip("-")
        return replace(self, url=f"{self.url}/{folder}-{uuid.uuid4().hex[:6]}")

    def count(self, method: str, part: str = "") -> int:
        return sum(r.method == method and part in r.path for r in self.requests)

    @property
    def num_lists(self) -> int:
        return sum(request.is_list for request in self.requests)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """A server process that ends with this one."""

    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, f"{command} ended"
            assert time.monotonic() < deadline, f"{command} does not listen"
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def proxy(store: Store, upstream: int, port: int) -> Iterator[None]:
    """Forwards from `port` to `upstream`, as the store says."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def handle_one_request(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle_one_request()

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, keep_blank_values=True)
            request = Request(self.command, parts.path, query, self.headers.get("Range"), len(body))
            store.requests.append(request)
            fault = next((f for f in store.faults if f.times and f.when(request)), None)
            if fault is not None:
                fault.times -= 1
                self.fail(fault.kind)
                return
            connection = http.client.HTTPConnection("127.0.0.1", upstream)
            with contextlib.closing(connection):
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                answer = connection.getresponse()
                content = answer.read()
                self.send_response(answer.status)
                dropped = ("transfer-encoding", "connection", "date", "server")
                headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in dropped]
                if not any(k.lower() == "content-length" for k, _ in headers):
                    headers.append(("Content-Length", str(len(content))))
                for key, value in headers:
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        def fail(self, kind: int | str) -> None:
            self.close_connection = True
            if kind == "hang":
                time.sleep(3)
            elif kind != "reset":
                self.send_response(int(kind))
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = forward

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def serve_s3() -> Iterator[Store]:
    """moto's server."""
    upstream, port = free_port(), free_port()
    store = Store(
        f"s3://{BUCKET}",
        {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "AKIAUNITTEST",
            "AWS_SECRET_ACCESS_KEY": "top/secret/value",
            "AWS_DEFAULT_REGION": "us-east-1",
            # Repeating is ours to do.
            "AWS_MAX_ATTEMPTS": "1",
        },
    )
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(upstream)]
    with running(command, upstream), proxy(store, upstream, port):
        yield store


def find_gcs() -> str | None:
    """fake-gcs-server: $FAKE_GCS_SERVER, on the PATH, or where Go installs programs."""
    where = os.pathsep.join((os.environ.get("PATH", ""), os.path.expanduser("~/go/bin")))
    return os.environ.get("FAKE_GCS_SERVER") or shutil.which("fake-gcs-server", path=where)


@contextlib.contextmanager
def serve_gcs() -> Iterator[Store]:
    """fake-gcs-server."""
    upstream, port = free_port(), free_port()
    endpoint = f"http://127.0.0.1:{port}"
    # The emulator has no gRPC, over which gcsfs would ask what kind of bucket this is.
    environment = {"STORAGE_EMULATOR_HOST": endpoint, "FSSPEC_GS_TOKEN": "anon"}
    environment["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    store = Store(f"gs://{BUCKET}", environment)
    command = [find_gcs(), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1"]
    command += ["-port", str(upstream), "-external-url", endpoint, "-public-host", "127.0.0.1"]
    with running(command, upstream), proxy(store, upstream, port):
        yield store
