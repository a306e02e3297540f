"""``cached_prefix``: marks the part of a dataset's work that is the same each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

MARK = "__fastloop_cached_prefix__"
Method = TypeVar("Method", bound=Callable[..., Any])
FilesOf = Callable[[Any, Any], Any]
"""Takes the dataset and an index; returns the path, or paths, of the files that the sample is made from."""


@overload
def cached_prefix(method: Method) -> Method: ...
@overload
def cached_prefix(*, file: FilesOf) -> Callable[[Method], Method]: ...
def cached_prefix(method: Any = None, *, file: FilesOf | None = None) -> Any:
    """Mark the method of a dataset whose results ``rungs.cache`` may store. The method itself does not change.

    ::

        class Scans(Dataset):
            @cached_prefix(file=lambda self, index: self.paths[index])
            def load(self, index):                      # reads and decodes; draws no random number
                return decode(self.paths[index])

            def __getitem__(self, index):
                return self.augment(self.load(index)), self.labels[index]

    The method takes an index, an integer or a string, and returns arrays, CPU tensors, PIL images, numbers, strings or
    bytes, in tuples, lists or dictionaries. Its result may depend on the index, on plain attributes of the dataset, and
    on the files named by `file`.

    Args:
        method: the method.
        file: names the files that a sample is read from, so that changed files are read again. Without it, samples are
            stored only for one run.
    """

    def mark(function: Any) -> Any:
        setattr(function, MARK, file or True)
        return function

    return mark if method is None else mark(method)
