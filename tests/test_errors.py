"""Errors for people: got, why, do."""

from __future__ import annotations

import pickle
import traceback

import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.multiprocessing.spawn import ProcessRaisedException

from fastloop.errors import (
    ConfigError,
    FastLoopError,
    NotApplicable,
    describe,
    is_out_of_memory,
    name_kind,
    quote,
    walk_causes,
)


@pytest.mark.parametrize(("kind", "code"), [(FastLoopError, 1), (ConfigError, 2)])
def test_the_three_parts(kind: type[FastLoopError], code: int) -> None:
    error = kind(
        got="rungs.amp.mode: 'fp8' (a.yaml:2)",
        why="it is not one of three",
        do="write bf16-mixed",
        key="rungs.amp.mode",
    )
    assert str(error) == "got rungs.amp.mode: 'fp8' (a.yaml:2)\n  why it is not one of three\n  do  write bf16-mixed"
    assert error.exit_code == code and isinstance(error, FastLoopError)


@pytest.mark.parametrize("kind", [FastLoopError, ConfigError])
def test_they_travel_between_processes(kind: type[FastLoopError]) -> None:
    error = kind(got="a", why="b", do="c", key="d")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind and str(back) == str(error)
    assert (back.got, back.why, back.do, back.key) == ("a", "b", "c", "d")


def test_a_reason_is_no_error_for_people() -> None:
    assert not issubclass(NotApplicable, FastLoopError)
    assert str(NotApplicable("needs CUDA")) == "needs CUDA"


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("Failed to CUDA malloc 4096 bytes"), True),
        (RuntimeError("HIP error: hipErrorOutOfMemory"), True),
        (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("NCCL Error 1: unhandled cuda error. Cuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), True),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"), True),
        (RuntimeError("miopenStatusAllocFailed"), True),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nCUDA error: out of memory"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (MemoryError("out of memory"), False),
        (ValueError("the cache is out of memory"), False),
    ],
)
def test_the_words_for_no_memory(error: Exception, is_memory: bool) -> None:
    """B6: all that a device says of it; Python's own is the host's."""
    assert is_out_of_memory(error) is is_memory


def test_a_reason_of_ours_is_told_whole_and_in_one_line() -> None:
    reason = "these modules are in the way:\n" + ", ".join(f"encoder.layers.{n}.attention" for n in range(20))
    assert describe(NotApplicable(reason)) == reason.replace("\n", " ")


def test_a_message_that_is_cut_says_so() -> None:
    assert describe(ValueError("1" * 300)) == f"ValueError: {'1' * 300}"
    assert describe(ValueError("1" * 301)) == f"ValueError: {'1' * 299}…"
    assert describe(ValueError("it \x1b[1mmust\x1b[0m be trusted")) == "ValueError: it must be trusted"


def bring(error: Exception) -> BaseException:
    """The error as torch brings it from a worker: its message is the worker's whole traceback."""
    try:
        raise error
    except Exception:
        brought = ExceptionWrapper(where="in DataLoader worker process 0")  # type: ignore[no-untyped-call]
    with pytest.raises(type(error), match="Original Traceback") as raised:
        brought.reraise()
    return raised.value


def with_context(error: Exception) -> Exception:
    try:
        raise KeyError("label")
    except KeyError as inner:
        error.__context__ = inner
    return error


def show_inner() -> Exception:
    try:
        raise KeyError("label")
    except KeyError:
        return RuntimeError("row 7 is broken:\n" + traceback.format_exc())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("row 0 is broken"), "ValueError: row 0 is broken"),
        (
            ValueError("row 0 is broken:\n  it has no label\nsee above"),
            "ValueError: row 0 is broken: it has no label see above",
        ),
        (ValueError(), "ValueError"),
        (ValueError("it \x1b[1mmust\x1b[0m be trusted"), "ValueError: it must be trusted"),
        (FastLoopError(got="1", why="it is odd", do="write 2"), "FastLoopError: got 1 why it is odd do write 2"),
    ],
)
def test_an_error_is_quoted_in_one_line(error: Exception, said: str) -> None:
    assert quote(error) == said


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("row 0\nsee above", "ValueError: row 0"),
        ("row 0 is broken:\n\n  no label\nsee above", "ValueError: row 0 is broken: no label"),
    ],
)
def test_the_beginning_of_a_message_tells_what_it_announces(message: str, said: str) -> None:
    assert quote(ValueError(message), briefly=True) == said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("row 0 is broken"), "ValueError: row 0 is broken"),
        (ValueError("row 0 is broken:\nit has no label"), "ValueError: row 0 is broken: it has no label"),
        (with_context(ValueError("row 7 has no label")), "ValueError: row 7 has no label"),
        (show_inner(), "RuntimeError: row 7 is broken: Traceback (most recent call last): KeyError: 'label'"),
    ],
)
def test_an_error_in_a_worker_is_quoted_in_its_own_words(error: Exception, said: str) -> None:
    assert quote(bring(error)) == f"{said} (in DataLoader worker process 0)"


def test_an_error_in_a_spawned_process_is_quoted_in_its_own_words() -> None:
    """As in a run with ddp_spawn; torch's message is the whole traceback."""
    try:
        raise with_context(ValueError("row 7 has no label"))
    except ValueError:
        trace = traceback.format_exc()
    error = ProcessRaisedException(f"\n\n-- Process 1 terminated with the following error:\n{trace}", 1, 7)
    assert quote(error) == "ValueError: row 7 has no label (in Process 1)"


def test_each_cause_is_walked_once() -> None:
    def raise_itself(error: Exception) -> None:
        raise error from error

    with pytest.raises(ValueError) as raised:
        raise_itself(ValueError("own cause"))
    assert list(walk_causes(raised.value)) == [raised.value]
    first, second = KeyError("first"), ValueError("second")
    second.__cause__, first.__context__ = first, second
    assert list(walk_causes(second)) == [second, first]


class Index:
    pass


@pytest.mark.parametrize(("value", "name"), [(Index(), "an Index"), ({}, "a dict"), (1, "an int"), (1.0, "a float")])
def test_classes_have_their_article(value: object, name: str) -> None:
    assert name_kind(value) == name
