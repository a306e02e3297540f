"""A store in a server that speaks the Redis protocol, for the processes of one node or of many.

All keys begin with our prefix, and only those that this module wrote are ever read, replaced or deleted. A server that
goes away costs one warning and the time to decode; it is asked again every few seconds.
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
"""The variable that holds the server's password, if it has one: configurations are written into run directories."""
_TIMEOUT_S, _RETRY_S = 2.0, 5.0


class ServerAway(Exception):
    """The server does not answer; said once in a process for each time that it goes away."""


def connect(url: str) -> Any:
    """A client of the server, or of its cluster.

    Raises:
        NotApplicable: there is no client library, or no server.
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
        name: of the cache; its keys begin with it.
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
        """The record under a key, where there is one of ours.

        Raises:
            ServerAway: when it has gone.
        """
        with self._ask() as client:
            if client is not None and (found := self._read(client, key)) is not None and is_ours(found):
                return memoryview(found)
        return None

    def put(self, key: bytes, record: bytes) -> bool:
        """Keep a record; False where the server has no room, is away, or holds somebody else's value there.

        Raises:
            StoreFull: for the first record that did not fit.
            ServerAway: when it has gone.
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
                client.set(name, record)  # a damaged one of ours
            return True
        return False

    def count(self) -> Mapping[str, int]:
        """Nothing is counted in a server that others use too."""
        return {}

    def close(self) -> None:
        """Close this process's connections; what is kept stays."""
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
            return b""  # a list or a set of somebody else's
        return found

    @contextlib.contextmanager
    def _ask(self) -> Iterator[Any]:
        """The client, connected in this process; None while the server is away."""
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
    """The store `name` in a server that answers.

    Raises:
        NotApplicable: there is none.
    """
    # Read-only or full: found out again with the first sample.
    with contextlib.closing(connect(url)) as client, contextlib.suppress(Exception):
        client.set(f"{PREFIX}{name}:info", json.dumps(dict(info)), nx=True)
    return ServerStore(url, name)


def read_room(url: str) -> int | None:
    """Bytes that the server may still take; None where it has no limit that it tells.

    Raises:
        NotApplicable: there is none.
    """
    with contextlib.closing(connect(url)) as client:
        nodes = client.info("memory")
    told = [nodes] if "used_memory" in nodes else list(nodes.values())
    limits = [each.get("maxmemory") or each.get("total_system_memory") for each in told]
    rooms = [limit - each["used_memory"] for limit, each in zip(limits, told, strict=True) if limit]
    return max(0, sum(rooms)) if rooms else None


def list_server(url: str) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Name, bytes and info of each cache in a server. Goes through its keys.

    Raises:
        NotApplicable: there is none.
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
    """Delete one cache's keys from a server, and no other. True.

    Raises:
        NotApplicable: there is none.
    """
    redis: Any = importlib.import_module("redis")
    with contextlib.closing(connect(url)) as client:
        for key in list(client.scan_iter(match=f"fastloop-samples:{name}:*", count=1000)):
            with contextlib.suppress(redis.ResponseError):  # no text, and so not ours
                if key.endswith(b":info") or is_ours(client.getrange(key, 0, RECORD_HEAD - 1)):
                    client.unlink(key)
    return True
