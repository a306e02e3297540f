"""A store in a Redis server: a real one, where Debian's package is installed."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastloop.errors import NotApplicable
from fastloop.feeds.cache import server
from fastloop.feeds.cache.mapped import StoreFull
from fastloop.feeds.cache.records import pack, unpack
from fastloop.feeds.cache.server import PREFIX, ServerAway, ServerStore, clear_server, list_server, open_server

redis = pytest.importorskip(
    "redis", reason='the redis package is not installed: pip install "lightning-fastloop[redis]"'
)
pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="there is no redis-server: apt-get install redis-server"
)
KEY = b"k" * 16


def find_port() -> int:
    """A free one; a cluster also takes the one 10,000 above."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            return port


class Server:
    """A server of this test's own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = find_port()
        self.folder, self.options = folder, options
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: Any = None
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self.folder]
        self.process = subprocess.Popen([*command, *self.options], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with contextlib.suppress(redis.ConnectionError):
                self.client().ping()
                return
            time.sleep(0.05)
        raise AssertionError("the server did not start")

    def client(self) -> Any:
        return redis.Redis(port=self.port, password=self.options[-1] if "--requirepass" in self.options else None)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(20)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.stop()


def read(store: ServerStore, key: bytes = KEY) -> Any:
    found = store.get(key)
    sample = None if found is None else unpack(key, found)
    return None if sample is None else sample[0]


def test_what_was_put_is_there_for_all(running: Server) -> None:
    store = open_server(running.url, "a", {"dataset": "mine"})
    assert read(store) is None and store.put(KEY, pack(KEY, (1, b"x" * 1000)))
    other = open_server(running.url, "a", {})
    assert read(other) == (1, b"x" * 1000) and read(open_server(running.url, "b", {})) is None
    assert [(name, size > 1000, info) for name, size, info in list_server(running.url)] == [
        ("1:a", True, {"dataset": "mine"}),
        ("1:b", False, {}),
    ]
    store.close()
    assert read(store) == (1, b"x" * 1000), "it connects again"
    for each in (store, other):
        each.close()


def test_a_server_that_goes_away_and_comes_back(running: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_RETRY_S", 0.3)
    store = open_server(running.url, "a", {})
    store.put(KEY, pack(KEY, 1))
    running.stop()
    with pytest.raises(ServerAway, match="does not answer"):
        store.get(KEY)
    assert store.get(KEY) is None and store.put(KEY, pack(KEY, 1)) is False, "said once"
    time.sleep(0.4)
    assert store.get(KEY) is None, "asked again, and not said again"
    running.start()
    time.sleep(0.4)
    assert store.get(KEY) is None and store.put(KEY, pack(KEY, 2)) and read(store) == 2
    running.stop()
    with pytest.raises(ServerAway):
        store.put(KEY, pack(KEY, 2))
    store.close()


def test_somebody_elses_keys_are_neither_read_nor_replaced_nor_deleted(running: Server) -> None:
    client = running.client()
    name = f"{PREFIX}a:{KEY.hex()}"
    client.set("theirs", "1")
    client.rpush(name, "a list of theirs")
    client.set(f"{PREFIX}a:{'6a' * 16}", "a text of theirs")
    store = open_server(running.url, "a", {})
    assert store.get(KEY) is None and store.put(KEY, pack(KEY, 1)) is False
    assert store.get(b"j" * 16) is None and store.put(b"j" * 16, pack(b"j" * 16, 1)) is False
    assert store.put(b"i" * 16, pack(b"i" * 16, 1)), "what is ours works on"
    store.close()
    assert clear_server(running.url, "1:a")
    assert sorted(client.keys()) == sorted([b"theirs", name.encode(), f"{PREFIX}a:{'6a' * 16}".encode()])
    assert client.lrange(name, 0, -1) == [b"a list of theirs"]


def test_a_damaged_value_is_written_anew(running: Server) -> None:
    store = open_server(running.url, "a", {})
    store.put(KEY, pack(KEY, b"x" * 100))
    running.client().setrange(f"{PREFIX}a:{KEY.hex()}", 60, b"??")
    assert store.get(KEY) is not None and read(store) is None, "the fault fired"
    assert store.put(KEY, pack(KEY, b"x" * 100)) and read(store) == b"x" * 100
    store.close()


def test_a_server_without_room_says_so_once(tmp_path: Path) -> None:
    running = Server(tmp_path, "--maxmemory", "3mb")
    try:
        store, said = open_server(running.url, "a", {}), 0
        for number in range(40):
            key = bytes([number]) * 16
            try:
                store.put(key, pack(key, b"x" * 200_000))
            except StoreFull as reason:
                assert "memory" in str(reason)
                said += 1
        assert said == 1 and read(store, bytes(16)) == b"x" * 200_000
        assert server.read_room(running.url) in range(3 * 2**20)
        store.close()
    finally:
        running.stop()


def test_a_password_comes_from_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Server(tmp_path, "--requirepass", "opensesame")
    try:
        with pytest.raises(NotApplicable, match=r"no server answers at .*uthenticat"):
            open_server(running.url, "a", {})
        with monkeypatch.context() as patch:
            patch.setenv(server.PASSWORD, "opensesame")
            store = open_server(running.url, "a", {})
            assert store.put(KEY, pack(KEY, 1)) and read(store) == 1
            store.close()
    finally:
        running.stop()


def test_a_cluster_of_one_node(tmp_path: Path) -> None:
    running = Server(tmp_path, "--cluster-enabled", "yes")
    try:
        client = running.client()
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        end = time.monotonic() + 20
        while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO") and time.monotonic() < end:
            time.sleep(0.1)
        store = open_server(running.url, "a", {})
        for number in range(20):
            key = bytes([number]) * 16
            assert store.put(key, pack(key, number)) and read(store, key) == number
        assert next(list_server(running.url))[0] == "1:a" and server.read_room(running.url)
        store.close()
        clear_server(running.url, "1:a")
        assert client.dbsize() == 0
    finally:
        running.stop()


def test_no_server_and_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotApplicable, match=r"no server answers at redis://127\.0\.0\.1:1/0: "):
        open_server("redis://127.0.0.1:1/0", "a", {})
    with pytest.raises(NotApplicable, match="no server answers at nonsense"):
        open_server("nonsense", "a", {})
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(NotApplicable, match=r'pip install "lightning-fastloop\[redis\]"'):
        open_server("redis://127.0.0.1:1/0", "a", {})
