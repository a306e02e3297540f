"""Fingerprints the user's code and the values that it reads: the fingerprint changes when either changes.

What cannot be compared safely has no fingerprint, and the error says why: a stored sample must never stand for another.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import inspect
import os
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path, PurePath
from types import CodeType, ModuleType
from typing import Any

from fastloop.evidence.samples import sample_code, writes
from fastloop.evidence.samples.random_draws import draws_random
from fastloop.evidence.samples.source import read_source

_MOST_DEPTH, _LONG = 12, 100
_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "expandvars"})


class NoFingerprint(Exception):
    """Something cannot be fingerprinted; the message says what, and why."""


def digest_texts(*texts: str) -> bytes:
    """Return a 16-byte digest of these texts in this order."""
    made = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        made.update(len(data).to_bytes(8, "little") + data)
    return made.digest()


def read_method(owner: Any, function: Any) -> tuple[bytes, tuple[str, ...]]:
    """Return the fingerprint of a method called on `owner`, and the attributes of `owner` that it reads.

    Raises:
        NoFingerprint: the method, or something that it reads, has none.
    """
    return _Reader(owner).read(function)


class _Reader:
    """Follows one method through its calls and the values it reads."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.words: list[str] = []
        self.attributes: dict[str, None] = {}
        self._written: set[str] = set()
        self._seen: set[int] = set()

    def read(self, function: Any) -> tuple[bytes, tuple[str, ...]]:
        self._read_function(function, 0)
        values = {name: getattr(self.owner, name) for name in self.attributes}
        # Leave out an attribute that is still None if the method sets it itself, such as a file that it opens late.
        read = tuple(name for name, value in values.items() if value is not None or name not in self._written)
        for name in read:
            self.words.append(f"self.{name}")
            self._read_value(values[name], f"self.{name}", 0)
        return digest_texts(*self.words), read

    def _read_function(self, function: Any, depth: int, me: bool = True) -> None:
        name = getattr(function, "__qualname__", repr(function))
        if depth > _MOST_DEPTH:
            raise NoFingerprint(f"{name} nests its calls too deeply to follow")
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if (changed := next(sample_code.list_changed_state(function), None)) is not None:
            raise NoFingerprint(f"{name} changes{changed} from sample to sample")
        if draws := draws_random(function):
            raise NoFingerprint(f"{name} draws random numbers, judging by the names it uses ({', '.join(draws)})")
        if variables := sorted(_ENVIRONMENT.intersection(sample_code.list_names(function.__code__))):
            raise NoFingerprint(f"{name} reads environment variables, judging by the names it uses ({variables[0]})")
        self._read_code(function.__code__)
        self._read_value(function.__defaults__, f"a default of {name}", depth)
        self._read_value(function.__kwdefaults__, f"a default of {name}", depth)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if variable != "__class__":
                self._read_value(cell.cell_contents, f"{variable} around {name}", depth)
        for variable, value in sample_code.list_globals(function):
            self.words.append(variable)
            if isinstance(value, ModuleType) and not sample_code.is_installed(value):
                self._read_own_module(function.__code__, value, depth)
            else:
                self._read_value(value, variable, depth)
        if me:
            self._read_self(function, name, depth)

    def _read_code(self, code: CodeType) -> None:
        self.words += [code.co_code.hex(), repr(code.co_names), repr(code.co_varnames), repr(code.co_freevars)]
        for const in code.co_consts:
            if isinstance(const, CodeType):
                self._read_code(const)
            else:
                self.words.append(repr(sorted(map(repr, const)) if isinstance(const, frozenset) else const))

    def _read_own_module(self, code: CodeType, module: ModuleType, depth: int) -> None:
        """Read what a function may use from one of the user's modules, judging by the names in its code."""
        for name in code.co_names:
            if name in vars(module):
                self.words.append(f"{module.__name__}.{name}")
                self._read_value(vars(module)[name], f"{module.__name__}.{name}", depth + 1)

    def _read_self(self, function: Any, name: str, depth: int) -> None:
        """Read the owner's attributes that the method uses, and the methods that it calls."""
        try:
            # Ask for the code object's source: for a decorated function, getsource would return the inner function's.
            tree = ast.parse(textwrap.dedent(read_source(function.__code__)))
        except (OSError, TypeError, SyntaxError):
            raise NoFingerprint(f"the source of {name} cannot be read") from None
        me = function.__code__.co_varnames[0]
        uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == me]
        members = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        mine = [node for node in members if isinstance(node.value, ast.Name) and node.value.id == me]
        if len(uses) > len(mine):
            raise NoFingerprint(f"{name} passes {me} to other code, so what it reads is unknown")
        of_bases = [node for node in members if writes.is_super(node.value)]
        if len(of_bases) < sum(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(tree)):
            raise NoFingerprint(f"{name} uses super() in an unusual way, so what it reads is unknown")
        for node in of_bases:
            member = sample_code.find_super(function, type(self.owner), node.attr)
            if member is None:
                raise NoFingerprint(f"{name} reads {node.attr} of its base class, which was not found")
            if sample_code.is_installed(member):
                self._read_value(member, f"{node.attr} of the base class", depth + 1)
            else:
                self._read_function(member, depth + 1)
        for node in mine:
            if isinstance(node.ctx, ast.Store):
                self._written.add(node.attr)
                continue
            member = inspect.getattr_static(type(self.owner), node.attr, None)
            member = member.fget if isinstance(member, property) else member
            if inspect.isfunction(member) and node.attr not in vars(self.owner):
                self._read_function(member, depth + 1)
            elif not hasattr(self.owner, node.attr):
                self._written.add(node.attr)
            else:
                self.attributes[node.attr] = None

    def _read_value(self, value: Any, name: str, depth: int) -> None:
        """Add a value's words to the fingerprint, depending on its type."""
        if depth > _MOST_DEPTH:
            raise NoFingerprint(f"{name} is nested too deeply to follow")
        kind = type(value)
        if value is None or kind in (bool, int, float, complex, str, bytes) or isinstance(value, (enum.Enum, PurePath)):
            self.words.append(f"{kind.__qualname__} {value!r}")
        elif kind in (tuple, list):
            self.words.append(f"{kind.__name__} {len(value)}")
            if len(value) > _LONG and all(type(member) in (str, int) for member in value):
                self.words += [digest_texts(*map(repr, value)).hex()]
                return
            for member in value:
                self._read_value(member, f"a part of {name}", depth + 1)
        elif kind in (dict, set, frozenset):
            self._read_unordered(value, name, depth)
        elif isinstance(value, ModuleType):
            self._read_package(value)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._read_value(part, name, depth + 1)
        elif (words := _describe_array(value)) is not None:
            self.words.append(words)
        elif callable(value) and _is_where_it_says(value) and sample_code.is_installed(value):
            self.words.append(f"{value.__module__}.{value.__qualname__}")
            self._read_package(sys.modules[value.__module__])
        elif inspect.isfunction(value):
            self._read_function(value, depth + 1, me=False)
        elif kind.__module__.startswith("torchvision.transforms."):
            if draws := draws_random(value):
                raise NoFingerprint(f"{name} draws random numbers ({', '.join(draws)})")
            self.words.append(f"{kind.__module__}.{kind.__qualname__}")
            self._read_value(_list_settings(value), name, depth + 1)
            self._read_package(sys.modules["torchvision"])
        else:
            raise NoFingerprint(f"{name} ({kind.__module__}.{kind.__qualname__}) cannot be fingerprinted")

    def _read_unordered(self, value: Any, name: str, depth: int) -> None:
        parts = []
        for member in value.items() if isinstance(value, dict) else value:
            outer, self.words = self.words, []
            self._read_value(member, f"a part of {name}", depth + 1)
            parts.append(digest_texts(*self.words).hex())
            self.words = outer
        self.words += [type(value).__name__, *sorted(parts)]

    def _read_package(self, module: ModuleType) -> None:
        """Add an installed package's name and version; in the user's own modules, only functions are followed."""
        top = module.__name__.partition(".")[0]
        self.words.append(f"{module.__name__} {getattr(sys.modules.get(top), '__version__', None)}")


def _is_where_it_says(value: Any) -> bool:
    """Whether a function or class can be found under its own name, so that the name identifies it."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for name in str(getattr(value, "__qualname__", "?")).split("."):
        found = getattr(found, name, None)
    return found is value


def _describe_array(value: Any) -> str | None:
    """Describe arrays and tensors, and their scalars, dtypes and devices, by content; None for anything else."""
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, (torch.dtype, torch.device)):
        return repr(value)
    if torch is not None and type(value) is torch.Tensor and value.device.type == "cpu":
        value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    if numpy is not None and isinstance(value, numpy.dtype):
        return repr(value)
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)) or value.dtype.hasobject:
        return None
    return f"{value.dtype.str} {value.shape} {hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()}"


def _list_settings(transform: Any) -> dict[str, Any]:
    """Return the settings of a torchvision transform: its attributes, except those that every torch module has."""
    torch: Any = sys.modules["torch"]
    own = vars(torch.nn.Module())
    return {name: value for name, value in vars(transform).items() if name not in own}


def identify_files(paths: Any) -> str:
    """Identify a version of files by each one's path, size, modification time, change time and inode.

    Tools that unpack or copy files set the modification time; the change time cannot be set.

    Raises:
        OSError: a file does not exist.
    """
    several: Iterable[Any] = (paths,) if isinstance(paths, (str, bytes, os.PathLike)) else paths
    words = []
    for path in several:
        name = os.fsdecode(path)
        found = Path(name).stat()
        words.append(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ctime_ns}\0{found.st_ino}")
    return "\0\0".join(words)
