"""Stands in for a map-style dataset, and is that dataset for whoever looks at it."""

from __future__ import annotations

from typing import Any, ClassVar


class StandInDataset:
    """What it does not know itself is read from ``inner`` and written to it: by a worker_init_fn, get_worker_info(),
    trainer.train_dataloader. Subclasses name their own attributes, in the order in which their ``__init__`` takes them.
    """

    _OWN: ClassVar[tuple[str, ...]] = ("inner",)

    inner: Any

    def __getitem__(self, index: Any) -> Any:
        return self.inner[index]

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN:  # not set yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.inner)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, name) for name in self._OWN)
