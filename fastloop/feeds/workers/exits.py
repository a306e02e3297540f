"""Lets a worker whose dataset calls ``sys.exit`` say so: it would end, and the training only hear of its death."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import _DatasetKind


class SendsExits:
    """A ``worker_init_fn`` that calls another first. From then on its worker sends ``SystemExit`` as an exception."""

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self.own = own

    def __call__(self, worker_id: int) -> None:
        if self.own is not None:
            self.own(worker_id)
        create: Callable[..., Any] = _DatasetKind.create_fetcher

        def create_fetcher(*args: Any) -> Any:
            fetcher = create(*args)
            fetch = fetcher.fetch

            def fetch_or_raise(indices: Any) -> Any:
                try:
                    return fetch(indices)
                except SystemExit as error:
                    raise RuntimeError(f"SystemExit: {error}") from error

            fetcher.fetch = fetch_or_raise
            return fetcher

        _DatasetKind.create_fetcher = create_fetcher  # type: ignore[method-assign]
