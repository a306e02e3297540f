"""Fingerprints: what changes them, and what has none."""

from __future__ import annotations

import functools
import os
import random
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms as T

from fastloop.feeds.cache.fingerprint import NoFingerprint, digest_texts, identify_files, read_method

SCALE = 2
CALLS = [0]


def halve(x: Any) -> Any:
    return x / 2


def noisy(x: Any) -> Any:
    return x + random.random()


def timed(function: Any) -> Any:
    """A decorator as many write it."""

    @functools.wraps(function)
    def call(self: Any, *args: Any) -> Any:
        return function(self, *args)

    return call


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def by_constant(self, index: int) -> Any:
        return index * 3

    def by_global(self, index: int) -> Any:
        return index * SCALE

    def by_attribute(self, index: int) -> Any:
        return self.value

    @timed
    def decorated(self, index: int) -> Any:
        return self.value

    def by_method(self, index: int) -> Any:
        return self.by_attribute(index)

    def by_function(self, index: int) -> Any:
        return halve(np.float32(index))

    def opens_late(self, index: int) -> Any:
        if self.handle is None:
            self.handle = open(self.value)  # noqa: SIM115
        return self.handle.read()

    def has_default(self, index: int) -> Any:
        if self.value is None:
            self.value = 4
        return self.value

    def reads_environment(self, index: int) -> Any:
        return os.environ["CROP"]

    def asks_environment(self, index: int) -> Any:
        return os.getenv("CROP")

    def hands_self_on(self, index: int) -> Any:
        return halve(self)

    def draws(self, index: int) -> Any:
        return noisy(index)

    def counts(self, index: int) -> Any:
        CALLS[0] += 1
        return CALLS[0]

    @property
    def doubled(self) -> Any:
        return self.value * 2

    def by_property(self, index: int) -> Any:
        return self.doubled


def of(name: str, **attributes: Any) -> bytes:
    return read_method(Plain(**attributes), getattr(Plain, name))[0]


def reads(name: str, **attributes: Any) -> tuple[str, ...]:
    return read_method(Plain(**attributes), getattr(Plain, name))[1]


def recoded(name: str, old: Any, new: Any) -> Callable[..., Any]:
    """The method with another constant: the same name, another code."""
    method = getattr(Plain, name)
    code = method.__code__
    changed = code.replace(co_consts=tuple(new if const == old else const for const in code.co_consts))
    made = types.FunctionType(changed, method.__globals__, name)
    made.__qualname__ = method.__qualname__
    return made


def test_the_same_code_and_values_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("by_constant", "by_global", "by_function"):
        assert of(name) == of(name, value=1, other=2)
    assert of("by_attribute", value=[1, "a"]) == of("by_attribute", value=[1, "a"], other=3)
    assert len({of(name, value=1) for name in ("by_constant", "by_global", "by_function", "by_attribute")}) == 4


def test_another_constant_global_or_function_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed transform under the same name."""
    assert read_method(Plain(), recoded("by_constant", 3, 4))[0] != of("by_constant")
    before = of("by_global"), of("by_function")
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3)
    monkeypatch.setattr(halve, "__code__", (lambda x: x / 3).__code__)
    assert of("by_global") != before[0] and of("by_function") != before[1]


@pytest.mark.parametrize("name", ["by_attribute", "by_method", "by_property"])
def test_another_attribute_has_another(name: str) -> None:
    values = [
        *(1, 1.0, True, "1", b"1", None, (1, 2), [1, 2], {1, 2}, {1: 2}, {2: 1}, Path("/a"), Path("/b")),
        *(np.arange(3), np.arange(4), np.arange(3.0), torch.ones(2), torch.zeros(2), torch.float32, np.dtype("int8")),
        *(["x"] * 200, ["x"] * 199 + ["y"], halve, functools.partial(halve, 1), T.Resize(5), T.Resize(6)),
        *(T.Compose([T.Resize(5)]), T.Compose([T.CenterCrop(5)]), np.load, os.fspath, torch.nn.functional.relu),
    ]
    found = [of(name, value=value) for value in values]
    assert len(set(found)) == len(values)
    assert reads(name, value=1, other=2) == ("value",)


class Derived(Plain):
    def by_global(self, index: int) -> Any:
        return super().by_global(index)

    def by_attribute(self, index: int) -> Any:
        return 2 * super().by_attribute(index)

    def unusual(self, index: int) -> Any:
        base = super()
        return base.by_global(index)

    def missing(self, index: int) -> Any:
        return super().nothing(index)  # type: ignore[misc]


def test_what_a_base_class_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = read_method(Derived(), Derived.by_global)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", SCALE + 1)
    assert read_method(Derived(), Derived.by_global)[0] != first
    found = {read_method(Derived(value=value), Derived.by_attribute)[0] for value in (1, 2)}
    assert len(found) == 2 and read_method(Derived(value=1), Derived.by_attribute)[1] == ("value",)


@pytest.mark.parametrize(
    ("name", "why"), [("unusual", "uses super\\(\\) in an unusual way"), ("missing", "nothing of its base class")]
)
def test_a_base_class_that_cannot_be_followed(name: str, why: str) -> None:
    with pytest.raises(NoFingerprint, match=why):
        read_method(Derived(), getattr(Derived, name))


def test_a_decorator_does_not_hide_what_a_method_reads() -> None:
    """Its source is the method's by functools.wraps, and its own code hands self on."""
    with pytest.raises(NoFingerprint, match="passes self to other code"):
        read_method(Plain(value=1), Plain.decorated)


def test_what_it_sets_itself_is_read_unless_it_is_still_unset() -> None:
    assert reads("opens_late", value="a", handle=None) == ("value",)
    assert reads("has_default", value=None) == () and reads("has_default", value=8) == ("value",)
    assert len({of("has_default", value=value) for value in (None, 2, 8)}) == 3
    with open(os.devnull) as handle, pytest.raises(NoFingerprint, match=r"self.handle .* cannot be fingerprinted"):
        of("opens_late", value="a", handle=handle)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("hands_self_on", None, "Plain.hands_self_on passes self to other code, so what it reads is unknown"),
        ("reads_environment", None, "reads environment variables, judging by the names it uses (environ)"),
        ("asks_environment", None, "reads environment variables, judging by the names it uses (getenv)"),
        ("draws", None, "Plain.draws draws random numbers, judging by the names it uses"),
        ("counts", None, "Plain.counts changes (the outer CALLS) from sample to sample"),
        ("by_attribute", object(), "self.value (builtins.object) cannot be fingerprinted"),
        ("by_attribute", Plain(), "self.value (tests.feeds.cache.test_fingerprint.Plain) cannot be fingerprinted"),
        ("by_attribute", functools.partial(halve, object()), "(builtins.object) cannot be fingerprinted"),
        ("by_attribute", [1, [object()]], "a part of a part of self.value (builtins.object) cannot be fingerprinted"),
        ("by_attribute", {1: 2}.get, "self.value (builtins.builtin_function_or_method) cannot be fingerprinted"),
        ("by_attribute", T.RandomCrop(3), "self.value draws random numbers"),
        ("by_attribute", np.array([object()]), "self.value (numpy.ndarray) cannot be fingerprinted"),
    ],
)
def test_what_has_none_is_named(name: str, value: Any, why: str) -> None:
    """K2."""
    with pytest.raises(NoFingerprint) as refused:
        of(name, value=value)
    assert why in str(refused.value)


def test_code_without_source_has_none() -> None:
    scope: dict[str, Any] = {}
    exec("def load(self, index): return self.value", scope)
    with pytest.raises(NoFingerprint, match="the source of load cannot be read"):
        read_method(Plain(value=1), scope["load"])


def test_functions_of_the_users_own_modules_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_decoder.py").write_text("def decode(x):\n    return x + 1\n")
    (tmp_path / "own_data.py").write_text(
        "import own_decoder\nclass Data:\n    def load(self, index):\n        return own_decoder.decode(index)\n"
    )
    import own_data  # type: ignore[import-not-found]
    import own_decoder  # type: ignore[import-not-found]

    before = read_method(own_data.Data(), own_data.Data.load)[0]
    monkeypatch.setattr(own_decoder.decode, "__code__", (lambda x: x + 2).__code__)
    assert read_method(own_data.Data(), own_data.Data.load)[0] != before
    for name in ("own_data", "own_decoder"):
        sys.modules.pop(name)


def test_a_changed_file_is_another_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("one")
    os.utime(file, ns=(1, 1))
    seen = {identify_files(file)}
    file.write_text("two")  # the same size
    os.utime(file, ns=(1, 2))
    seen.add(identify_files(file))
    other = tmp_path / "b"
    other.write_text("two")
    os.utime(other, ns=(1, 2))
    other.replace(file)  # the same size and time
    seen.add(identify_files(str(file)))
    seen.add(identify_files([file, file]))
    time.sleep(0.05)  # the clock of change times ticks in milliseconds
    with file.open("r+") as opened:  # the same size, time and inode
        opened.write("six")
    os.utime(file, ns=(1, 2))
    seen.add(identify_files(file))
    assert len(seen) == 5 and identify_files(file) in seen
    with pytest.raises(FileNotFoundError):
        identify_files(tmp_path / "none")


def test_texts_are_kept_apart() -> None:
    assert digest_texts("a", "b") != digest_texts("ab") != digest_texts("", "ab") and len(digest_texts()) == 16
