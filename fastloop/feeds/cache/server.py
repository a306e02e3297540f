"""A store in a server that speaks the Redis protocol, for processes on one or more nodes.

All keys begin with our prefix, and only values that this module wrote are ever read, replaced or deleted. If the server
goes away, the user gets one warning, samples are decoded again, and the connection is retried every few seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from fastloop.errors import NotApplicable
from fastloop.feeds.cache.mapped import StoreFull
from fastloop.feeds.cache.records import FORMAT, RECORD_HEAD, is_ours

PREFIX = f"fastloop-samples:{FORMAT}:"
PASSWORD = "FASTLOOP_REDIS_PASSWORD"
"""Environment variable for the server's password; not in the configuration, which is saved in run directories."""
_TIMEOUT_S, _RETRY_S = 2.0, 5.0


class ServerAway(Exception):
    """The server does not answer; raised in a process once each time it goes away."""


def connect(url: str) -> Any:
    """Connect to the server, or to its cluster.

    Raises:
        NotApplicable: the client library is not installed, or no server answers.
    """
    try:
        redis: Any = importlib.import_module("redis")
    except ImportError:
        raise NotApplicable('the redis package is not installed: pip install "lightning-fastloop[redis]"') from None
    settings: dict[str, Any] = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
    if os.environ.get(PASSWORD):
        settings["password"] = os.environ[PASSWORD]
    try:
        client = redis.Redis.from_url(url, **settings)
        if client.info("server").get("redis_mode") == "cluster":
            client.close()
            client = redis.RedisCluster.from_url(url, **settings)
        return client
    except (redis.RedisError, OSError, ValueError) as error:
        raise NotApplicable(f"no server answers at {url}: {error}") from None


class ServerStore:
    """Records by key in a server. Each process opens its own connections.

    Args:
        url: ``redis://host:port/0``, ``rediss://…`` or ``unix://…``.
        name: the cache's name, which its keys contain.
    """

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self._client: Any = None
        self._pid, self._away_until = -1, 0.0
        self._full = False

    def __getstate__(self) -> Mapping[str, Any]:
        return {"url": self.url, "name": self.name}

    def __setstate__(self, state: Mapping[str, str]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def get(self, key: bytes) -> memoryview | None:
        """Return the record under a key; None if there is none, or it is not ours.

        Raises:
            ServerAway: when the server has gone away.
        """
        with self._ask() as client:
            if client is not None and (found := self._read(client, key)) is not None and is_ours(found):
                return memoryview(found)
        return None

    def put(self, key: bytes, record: bytes) -> bool:
        """Store a record; return False if the server is full or away, or the key holds a value that is not ours.

        Raises:
            StoreFull: for the first record that does not fit.
            ServerAway: when the server has gone away.
        """
        if self._full:
            return False
        with self._ask() as client:
            if client is None:
                return False
            name = self._name(key)
            if not client.set(name, record, nx=True):
                held = self._read(client, key)
                if held is None or not is_ours(held):
                    return False
                client.set(name, record)  # replaces a damaged record that we wrote
            return True
        return False

    def count(self) -> Mapping[str, int]:
        """Return nothing: other programs may use the server too, so nothing is counted."""
        return {}

    def close(self) -> None:
        """Close this process's connections; the records stay."""
        client, self._client = self._client, None
        if client is not None and self._pid == os.getpid():
            client.close()
        self._pid = -1

    def _name(self, key: bytes) -> str:
        return f"{PREFIX}{self.name}:{key.hex()}"

    def _read(self, client: Any, key: bytes) -> bytes | None:
        redis: Any = importlib.import_module("redis")
        try:
            found: bytes | None = client.get(self._name(key))
        except redis.ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            return b""  # another program's list or set
        return found

    @contextlib.contextmanager
    def _ask(self) -> Iterator[Any]:
        """Yield the client, connected in this process; None while the server is away."""
        if self._pid != os.getpid():
            self._client, self._pid, self._away_until, self._full = None, os.getpid(), 0.0, False
        if time.monotonic() < self._away_until:
            yield None
            return
        wrong: Any = importlib.import_module("redis.exceptions")
        first = not self._away_until
        try:
            if self._client is None:
                self._client = connect(self.url)
            yield self._client
            self._away_until = 0.0
        except (wrong.ConnectionError, wrong.TimeoutError, wrong.ClusterDownError, NotApplicable, OSError) as error:
            self._away_until = time.monotonic() + _RETRY_S
            if first:
                raise ServerAway(f"the server at {self.url} does not answer ({error})") from None
        except wrong.ResponseError as error:  # out of memory, read-only, forbidden
            self._full = True
            raise StoreFull(str(error)) from None


def open_server(url: str, name: str, info: Mapping[str, Any]) -> ServerStore:
    """Open the store `name` on a server.

    Raises:
        NotApplicable: no server answers.
    """
    # Ignore errors such as read-only or full here: the first sample will show them.
    with contextlib.closing(connect(url)) as client, contextlib.suppress(Exception):
        client.set(f"{PREFIX}{name}:info", json.dumps(dict(info)), nx=True)
    return ServerStore(url, name)


def read_room(url: str) -> int | None:
    """Return the bytes that the server can still take; None if it reports no limit.

    Raises:
        NotApplicable: no server answers.
    """
    with contextlib.closing(connect(url)) as client:
        nodes = client.info("memory")
    infos = [nodes] if "used_memory" in nodes else list(nodes.values())
    limits = [each.get("maxmemory") or each.get("total_system_memory") for each in infos]
    rooms = [limit - each["used_memory"] for limit, each in zip(limits, infos, strict=True) if limit]
    return max(0, sum(rooms)) if rooms else None


def list_server(url: str) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yield name, bytes and info of each cache on a server. Scans its keys.

    Raises:
        NotApplicable: no server answers.
    """
    sizes: dict[str, int] = {}
    infos: dict[str, Mapping[str, Any]] = {}
    with contextlib.closing(connect(url)) as client:
        for found in client.scan_iter(match="fastloop-samples:*", count=1000):
            name, _, entry = found.decode(errors="replace").removeprefix("fastloop-samples:").rpartition(":")
            if entry == "info":
                with contextlib.suppress(ValueError):
                    infos[name] = json.loads(client.get(found) or b"{}")
            sizes[name] = sizes.get(name, 0) + int(client.memory_usage(found) or 0)
    yield from ((name, size, infos.get(name, {})) for name, size in sorted(sizes.items()))


def clear_server(url: str, name: str) -> bool:
    """Delete one cache's keys from a server, and no others. Returns True.

    Raises:
        NotApplicable: no server answers.
    """
    redis: Any = importlib.import_module("redis")
    with contextlib.closing(connect(url)) as client:
        for key in list(client.scan_iter(match=f"fastloop-samples:{name}:*", count=1000)):
            with contextlib.suppress(redis.ResponseError):  # not a string value, so not ours
                if key.endswith(b":info") or is_ours(client.getrange(key, 0, RECORD_HEAD - 1)):
                    client.unlink(key)
    return True
