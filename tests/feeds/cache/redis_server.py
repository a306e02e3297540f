"""A Redis server of a test's own."""

from __future__ import annotations

import contextlib
import importlib
import random
import socket
import subprocess
import time
from pathlib import Path
from typing import Any


def find_port() -> int:
    """A free one; a cluster also takes the one 10,000 above."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)  # tests seed the shared one alike in all workers
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
        redis: Any = importlib.import_module("redis")
        end = time.monotonic() + 100
        while time.monotonic() < end:
            assert self.process.poll() is None, "the server ended; another one may have taken its port"
            with contextlib.suppress(redis.ConnectionError):
                self.client().ping()
                return
            time.sleep(0.05)
        raise AssertionError("the server did not start")

    def client(self) -> Any:
        redis: Any = importlib.import_module("redis")
        return redis.Redis(port=self.port, password=self.options[-1] if "--requirepass" in self.options else None)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(100)
