"""The table itself: every kind has advice, and lines alone say enough where nothing else is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastloop.evidence.sync import table
from fastloop.evidence.sync.table import ADVICE, guess, is_known, name_call, name_cause


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("loss.item()", ".item()"),
        ("x.detach().cpu()", ".cpu()"),
        ("self.total += float(loss)", "float(tensor)"),
        ("x[mask]", "boolean mask"),
        ("x[mask] = y", "assignment by boolean mask"),
        ("if loss > 3:", "bool of a tensor"),
        ("print(loss)", "printing a tensor"),
        ("x.nonzero()", "nonzero"),
        ("torch.where(x > 1)", "torch.where(mask)"),
        ("batch.to(self.device)", "copy to the device"),
        ("y = x.to('cpu')", ".to('cpu')"),
        ("x.unique()", "unique"),
        ("torch.tensor(3.0, device=x.device)", "torch.tensor on the device"),
        ("loss.backward()", "in the backward"),
        ("foo(x)", "a synchronization"),
    ],
    ids=str,
)
def test_a_line_is_enough_to_guess_from(text: str, what: str) -> None:
    assert guess(text, ()) == what


def test_torchs_own_functions_say_more_than_the_line() -> None:
    assert guess("show(loss)", ("__repr__", "_str")) == "printing a tensor"
    assert guess("show(loss.item())", ("nothing_known",)) == ".item()"


def test_every_kind_has_advice() -> None:
    kinds = {*table._CALLS.values(), *table._LOG_CAUSES.values(), "progress bar", "synchronize()", "barrier()"}
    assert kinds <= set(ADVICE)
    assert all(len(text) > 10 and not text.endswith(".") for text in ADVICE.values())


@pytest.mark.parametrize("kind", table._LOG_CAUSES)
def test_the_frameworks_reasons_have_names(kind: str) -> None:
    assert name_cause(kind, "loss") in ADVICE and name_cause("prog_bar", None) == "progress bar"


def cuda(dtype: torch.dtype = torch.float32, is_cuda: bool = True, count: int = 3) -> Any:
    """A tensor that says it is on a GPU."""

    class There(torch.Tensor):
        @property
        def is_cuda(self) -> bool:  # type: ignore[override]
            return is_cuda

    return torch.ones(count, dtype=dtype).as_subclass(There)


HOST = torch.ones(3)


T = torch.Tensor
MASK = torch.ones(3).bool()
CROSSINGS: dict[str, tuple[Any, Any, Any, Any, str | None]] = {
    "item": (T.item, (cuda(),), {}, 1.0, ".item()"),
    "item of the host": (T.item, (HOST,), {}, 1.0, None),
    "to host": (T.to, (cuda(), "cpu"), {}, HOST, ".to('cpu')"),
    "to device": (T.to, (HOST, "cuda"), {}, cuda(), "copy to the device"),
    "non_blocking": (T.to, (HOST, "cuda"), {"non_blocking": True}, cuda(), None),
    "dtype": (T.to, (cuda(), torch.float16), {}, cuda(), None),
    "cuda": (T.cuda, (HOST,), {}, cuda(), "copy to the device"),
    "copy in": (T.copy_, (cuda(), HOST), {}, cuda(), "copy to the device"),
    "copy out": (T.copy_, (HOST, cuda()), {}, HOST, ".to('cpu')"),
    "copy there": (T.copy_, (cuda(), cuda()), {}, cuda(), None),
    "cpu of the host": (T.cpu, (HOST,), {}, HOST, None),
    "made there": (torch.tensor, (1.0,), {"device": "cuda"}, cuda(), "torch.tensor on the device"),
    "made here": (torch.tensor, (1.0,), {}, HOST, None),
    "of tensors there": (torch.tensor, ([cuda(), cuda()],), {}, HOST, "torch.tensor of tensors"),
    "of tensors here": (torch.tensor, ([HOST, HOST],), {}, HOST, None),
    "mask here": (T.__getitem__, (HOST, MASK), {}, HOST, None),
    "mask there": (T.__getitem__, (cuda(), MASK), {}, cuda(), "boolean mask"),
    "add": (torch.add, (cuda(), cuda()), {}, cuda(), None),
}


@pytest.mark.parametrize("case", CROSSINGS)
def test_on_cuda_only_what_crosses_counts(case: str) -> None:
    function, args, kwargs, out, what = CROSSINGS[case]
    assert name_call(function, args, kwargs, out, on_cuda=True) == what


def test_names_decide_what_is_looked_at() -> None:
    assert is_known("item") and is_known("__getitem__") and not is_known("add")
    assert name_call(SimpleNamespace(), (), {}, None, on_cuda=False) is None
