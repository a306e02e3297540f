"""The debug mode's warnings, spoken by this file: heard, blamed on the right line, and no other warning touched."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch

from fastloop.evidence.sync import cuda_warnings
from fastloop.evidence.sync.cuda_warnings import SyncMarks, SyncWarnings

SAID = "called a synchronizing CUDA operation (Triggered internally at somewhere.cpp:1.)"


class Cuda:
    """Stands in for the debug mode of a CUDA build."""

    mode = 0

    def set(self, mode: int | str) -> None:
        self.mode = {"default": 0, "warn": 1}.get(str(mode), mode)  # type: ignore[assignment]
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    found = Cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: found.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.set)
    yield found


def says() -> None:
    """As a synchronising call; torch warns in the name of the frame that called it."""
    warnings.warn(SAID, UserWarning, stacklevel=1)


def test_lines_are_found_and_other_warnings_pass(cuda: Cuda) -> None:
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        marks = SyncMarks()
        with marks:
            assert cuda.mode == 1
            for _ in range(2):
                says()
            warnings.warn("something else", FutureWarning, stacklevel=1)
        assert cuda.mode == 0
        warnings.warn(SAID, UserWarning, stacklevel=1)  # no longer ours
    (row,) = marks.result(steps=2)
    assert str(row["where"]).endswith(f"test_cuda_warnings.py:{says.__code__.co_firstlineno + 2}")
    assert row["per_step"] == 1 and row["ms_per_step"] is None and row["instead"]
    texts = [str(other.message)[:20] for other in others]
    assert texts == ["something else", "called a synchronizi"]
    assert others[0].category is FutureWarning


def test_filters_and_hook_are_as_before_even_after_an_error(cuda: Cuda) -> None:
    cuda.mode = 2
    before, shown = list(warnings.filters), warnings.showwarning
    with pytest.raises(ZeroDivisionError), SyncMarks():
        assert warnings.filters != before and warnings.showwarning is not shown
        raise ZeroDivisionError
    assert warnings.filters == before and warnings.showwarning is shown and cuda.mode == 2


def test_filters_that_make_errors_do_not_reach_ours(cuda: Cuda) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cuda.set = lambda mode: setattr(cuda, "mode", mode)  # type: ignore[method-assign]
        torch.cuda.set_sync_debug_mode = cuda.set
        marks = SyncMarks()
        with marks:
            says()
        assert len(marks.result()) == 1
        with pytest.raises(UserWarning):
            says()


def test_what_was_shown_once_is_not_shown_again(cuda: Cuda) -> None:
    shown = io.StringIO()

    def repeats() -> None:
        warnings.warn("once is enough", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_, **__: shown.write(f"{message}\n")
        repeats()
        with SyncMarks():
            repeats()
        repeats()
    assert shown.getvalue().count("once is enough") == 1


def test_a_hook_put_in_meanwhile_stays(cuda: Cuda) -> None:
    heard: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with SyncMarks() as marks:
            below = warnings.showwarning

            def theirs(message: object, *rest: object, **named: object) -> None:
                heard.append(str(message))
                below(message, *rest, **named)  # type: ignore[arg-type]

            warnings.showwarning = theirs
            says()
        assert warnings.showwarning is theirs and len(heard) >= 1 and len(marks.result()) == 1
        warnings.showwarning = lambda *_, **__: None


def test_threads_of_python_are_not_the_step_and_an_engines_are(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    import _thread

    marks = SyncMarks()
    with marks:
        worker = threading.Thread(target=says)
        worker.start()
        worker.join()
        assert marks.result() == ()
        done = threading.Event()
        _thread.start_new_thread(lambda: (says(), done.set()), ())
        assert done.wait(5)
    assert len(marks.result()) == 1


def test_an_error_while_noting_does_not_reach_the_step(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(_: object) -> None:
        calls.append(1)
        raise ValueError("planted")

    with SyncWarnings(broken):
        says()
    monkeypatch.setattr(cuda_warnings, "find_site", broken)
    with SyncMarks() as marks:
        says()
    assert calls == [1, 1] and marks.result() == ()


@pytest.mark.parametrize("error", [AttributeError, AssertionError, RuntimeError])
def test_without_the_debug_mode_watching_goes_on(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A build of torch without CUDA raises AssertionError; one that lacks the function AttributeError."""

    def refuse(*_: object) -> None:
        raise error("no such mode")

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", refuse)
    shown, filters = warnings.showwarning, list(warnings.filters)
    trained = []
    with SyncMarks() as marks:
        assert warnings.showwarning is shown and list(warnings.filters) == filters
        trained.append(1)
    assert trained and marks.result() == () and warnings.showwarning is shown


def test_nothing_that_compiled_code_guards_on_changes(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, marks = [], SyncMarks()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # Dynamo asks, too
    double = torch.compile(lambda x: 2 * x, backend=lambda graph, _: (graphs.append(1), graph)[1])
    double(torch.ones(2))
    with marks:
        assert cuda.mode == 1
        double(torch.ones(2))
    double(torch.ones(2))
    assert len(graphs) == 1
    torch._dynamo.reset()
