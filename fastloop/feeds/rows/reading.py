"""Reads which datasets only pick rows of tensors, arrays or lists that they hold in memory.

A TensorDataset does, and so does a user's class whose ``__getitem__`` is written like this:

    def __getitem__(self, index):
        x = torch.tensor(self.x[index], dtype=torch.float32)
        return {"x": x, "y": self.y[index]}

The source is read, the method is not called. If it does anything else, the dataset is left alone.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from fastloop.errors import describe, let_through, name_kind
from fastloop.records.facts import RowFacts

Change = Callable[[torch.Tensor], torch.Tensor]
_MAKERS = ("tensor", "as_tensor", "from_numpy")
_CASTS = ("float", "double", "half", "bfloat16", "long", "int", "short", "bool", "clone", "contiguous")


class NotRows(Exception):
    """The dataset does more than pick rows, or holds something else; says what."""


@dataclass(frozen=True)
class Column:
    """Values in memory, one row per sample, and the changes that are made to a row."""

    values: Any
    """A tensor, an array or a list of numbers; the user's own object."""
    changes: tuple[Change, ...] = ()
    """Applied to the row as a tensor; each works for one row and for many alike."""


@dataclass(frozen=True)
class Rows:
    """A dataset as columns, in the form of its samples: tuples, lists and dicts of `Column`."""

    form: Any
    count: int
    places: np.ndarray[Any, Any] | None = None
    """The row of each sample, int64 [count]; None: sample i is row i."""
    names: tuple[str, ...] = ()
    """The dataset's attributes that hold the columns."""

    @property
    def columns(self) -> list[Column]:
        return list_columns(self.form)

    def count_bytes(self) -> int:
        """Return the bytes of all columns; a column that is used twice counts once."""
        return sum({id(column.values): _measure_bytes(column.values) for column in self.columns}.values())


def list_columns(form: Any) -> list[Column]:
    """List the columns of such a form, in order."""
    if isinstance(form, Column):
        return [form]
    parts = form.values() if isinstance(form, Mapping) else form
    return [column for part in parts for column in list_columns(part)]


def read_facts(dataset: Any) -> RowFacts | str:
    """Return facts for a plan, or why the samples are not rows in memory. Does not read a Subset's indices."""
    try:
        whole = find_whole(dataset)
        rows, count = _read_whole(whole), len(dataset)
    except NotRows as why:
        return str(why)
    except Exception as error:  # raised by the user's class, which a loader may never call like this
        let_through(error)
        return f"{type(dataset).__name__} cannot be read: {describe(error)}"
    devices = {column.values.device.type for column in rows.columns if isinstance(column.values, torch.Tensor)}
    return RowFacts(what=type(whole).__name__, count=count, devices=tuple(sorted(devices)))


def find_whole(dataset: Any) -> Any:
    """Return the dataset behind a Subset, or the dataset itself."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def read_rows(dataset: Any) -> Rows:
    """Return a dataset's columns, without copying them.

    Raises:
        NotRows: its samples may not be rows.
    """
    if type(dataset) is Subset:
        return _take_subset(read_rows(dataset.dataset), dataset.indices)
    return _read_whole(dataset)


def _read_whole(dataset: Any) -> Rows:
    if type(dataset) is TensorDataset:
        form: Any = tuple(Column(_check(values, "one of its tensors")) for values in dataset.tensors)
        names: tuple[str, ...] = ("tensors",)
    else:
        form, names = _read_class(dataset)
    columns = list_columns(form)
    if not columns:
        raise NotRows(f"{type(dataset).__name__}'s samples hold no rows")
    count = len(dataset)
    if any(len(column.values) != count for column in columns):  # negative indices would count from another end
        raise NotRows(f"{type(dataset).__name__} has a length of {count:,}, but a different number of rows")
    return Rows(form, count, names=names)


def _take_subset(rows: Rows, indices: Sequence[int]) -> Rows:
    places = np.asarray(indices)
    if places.ndim != 1 or (places.size and places.dtype.kind not in "iu"):
        raise NotRows("a Subset's indices are not integers")
    places = places.astype(np.int64)
    if places.size and not (-rows.count <= places.min() and places.max() < rows.count):
        raise NotRows("a Subset's indices reach beyond its dataset")
    places = np.where(places < 0, places + rows.count, places)
    return replace(rows, count=len(places), places=places if rows.places is None else rows.places[places])


def _check(values: Any, name: str) -> Any:
    """Return the values themselves; raise NotRows if rows cannot be picked from them."""
    if type(values) is torch.Tensor:
        if values.layout is not torch.strided or values.requires_grad or values.is_quantized or not values.dim():
            raise NotRows(f"{name} is not a plain tensor")
        return values
    if type(values) is np.ndarray:
        if values.dtype.kind not in "biuf" or not values.ndim or not values.dtype.isnative:
            raise NotRows(f"{name} is an array of {values.dtype}")
        return values
    if type(values) is list:
        if not values or type(values[0]) not in (int, float, bool) or len(set(map(type, values))) > 1:
            raise NotRows(f"{name} is a list, but not of numbers of one kind")
        return values
    raise NotRows(f"{name} is {name_kind(values)}")


def _measure_bytes(values: Any) -> int:
    return 8 * len(values) if isinstance(values, list) else int(values.nbytes)


# -- a class of the user's, from its source ----------------------------------------------------------------------------


def _read_class(dataset: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the form of the samples, and the attributes that they are picked from."""
    kind = type(dataset)
    function = getattr(kind, "__getitem__", None)
    if not inspect.isfunction(function) or hasattr(dataset, "__getitems__"):
        raise NotRows(f"{kind.__name__} is not a TensorDataset, and its __getitem__ is not plain Python")
    looks_up = {"__getattribute__", "__getattr__"}
    if any(looks_up & set(vars(each)) for each in kind.__mro__ if each is not object):
        raise NotRows(f"{kind.__name__} defines __getattr__ or __getattribute__")
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError) as error:
        raise NotRows(f"the source of {kind.__name__}.__getitem__ cannot be read") from error
    is_wrapped = hasattr(function, "__wrapped__")  # its source is that of the function inside
    if not isinstance(parsed, ast.FunctionDef) or parsed.decorator_list or function.__closure__ or is_wrapped:
        raise NotRows(f"{kind.__name__}.__getitem__ is decorated, or made inside a function")
    names = [each.arg for each in parsed.args.args]
    if len(names) != 2 or parsed.args.vararg or parsed.args.kwarg or parsed.args.kwonlyargs or parsed.args.defaults:
        raise NotRows(f"{kind.__name__}.__getitem__ takes more than an index")
    reader = _Reader(dataset, function, *names)
    return reader.read(parsed.body), tuple(reader.found)


class _Reader:
    """Follows the statements of one ``__getitem__``."""

    def __init__(self, dataset: Any, function: Any, own: str, index: str) -> None:
        self._dataset, self._globals, self._own, self._index = dataset, function.__globals__, own, index
        self._known: dict[str, Any] = {}
        self.found: dict[str, Any] = {}
        """The values that the method picks rows from, by attribute."""

    def read(self, body: Sequence[ast.stmt]) -> Any:
        """Return the form of the samples that the method returns."""
        for statement in body:
            match statement:
                case ast.Expr(value=ast.Constant()):
                    continue
                case ast.Assign(targets=[ast.Name(id=name)]) if name not in (self._own, self._index, "torch"):
                    self._known[name] = self._follow(statement.value)
                case ast.Return(value=ast.expr() as value):
                    return self._follow(value)
                case _:
                    raise self._refuse(statement)
        raise NotRows(f"{type(self._dataset).__name__}.__getitem__ returns nothing")

    def _follow(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name) if name in self._known:
                return self._known[name]
            case ast.Tuple(elts=parts):
                return tuple(map(self._follow, parts))
            case ast.List(elts=parts):
                return list(map(self._follow, parts))
            case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
                return {key.value: self._follow(value) for key, value in zip(keys, values, strict=True)}  # type: ignore[union-attr]
            case ast.Subscript(
                value=ast.Attribute(value=ast.Name(id=self._own), attr=name), slice=ast.Name(id=self._index)
            ):
                return Column(self._find(name))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=maker), args=[inner]) if maker in _MAKERS:
                return self._make(node, maker, inner)
            case ast.Call(func=ast.Attribute(value=inner, attr=cast), args=[], keywords=[]) if cast in _CASTS:
                return self._cast(node, inner, cast)
        raise self._refuse(node)

    def _find(self, name: str) -> Any:
        kind = type(self._dataset)
        own = getattr(self._dataset, "__dict__", {})
        if name not in own or hasattr(getattr(kind, name, None), "__set__"):
            raise NotRows(f"{kind.__name__}.{name} is not an attribute of the object itself")
        self.found[name] = _check(own[name], f"{kind.__name__}.{name}")
        return self.found[name]

    def _make(self, node: ast.Call, maker: str, inner: ast.expr) -> Column:
        """``torch.tensor(row, dtype=torch.float32)`` and the like."""
        column, dtype = self._follow(inner), None
        if self._globals.get("torch") is not torch or not isinstance(column, Column):
            raise self._refuse(node)
        match node.keywords:
            case []:
                pass
            case [ast.keyword(arg="dtype", value=ast.Attribute(value=ast.Name(id="torch"), attr=name))]:
                dtype = getattr(torch, name, None)
            case _:
                raise self._refuse(node)
        if node.keywords and not isinstance(dtype, torch.dtype):
            raise self._refuse(node)
        is_array = isinstance(column.values, np.ndarray)
        if maker == "from_numpy" and not is_array:
            raise self._refuse(node)
        if dtype is None and (isinstance(column.values, list) or (is_array and column.values.ndim == 1)):
            raise self._refuse(node)  # torch would choose the dtype of a single number
        return Column(column.values, (*column.changes, partial(torch.Tensor.to, dtype=dtype)))

    def _cast(self, node: ast.Call, inner: ast.expr, cast: str) -> Column:
        column = self._follow(inner)
        if not isinstance(column, Column) or not (column.changes or isinstance(column.values, torch.Tensor)):
            raise self._refuse(node)  # an array has other methods
        return Column(column.values, (*column.changes, methodcaller(cast)))

    def _refuse(self, node: ast.AST) -> NotRows:
        text = " ".join(ast.unparse(node).split())
        return NotRows(f"{type(self._dataset).__name__}.__getitem__ does more than pick rows: {text[:80]}")
