"""``cached_prefix``: how a dataset says which part of its work is the same each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

MARK = "__fastloop_cached_prefix__"
Method = TypeVar("Method", bound=Callable[..., Any])
FilesOf = Callable[[Any, Any], Any]
"""Called with the dataset and an index: the path, or paths, of the files that the sample is made of."""


@overload
def cached_prefix(method: Method) -> Method: ...
@overload
def cached_prefix(*, file: FilesOf) -> Callable[[Method], Method]: ...
def cached_prefix(method: Any = None, *, file: FilesOf | None = None) -> Any:
    """Mark the method of a dataset whose results ``rungs.cache`` may keep. It stays the method that it is.

    ::

        class Scans(Dataset):
            @cached_prefix(file=lambda self, index: self.paths[index])
            def load(self, index):                      # reads and decodes; draws no random number
                return decode(self.paths[index])

            def __getitem__(self, index):
                return self.augment(self.load(index)), self.labels[index]

    The method takes an index, a whole number or a text, and returns arrays, CPU tensors, PIL images, numbers, texts or
    bytes, in tuples, lists or dictionaries. What it returns may depend on the index, on plain attributes of the
    dataset, and on the files named by `file`.

    Args:
        method: the method.
        file: names the files that a sample is read from, so that a changed one is read again. Without it samples are
            kept no longer than a run.
    """

    def mark(function: Any) -> Any:
        setattr(function, MARK, file or True)
        return function

    return mark if method is None else mark(method)
