"""One line where an exception's own text leaves people guessing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from fastloop.bridge.fail_open import explain_exception
from fastloop.ladder import collect_cards

DDP = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that"
    " your module has parameters that were not used in producing loss. You can enable unused parameter detection…\n"
    "Parameter indices which did not receive grad for rank 0: {}\n In addition, you can set the environment variable"
    " TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
)


def module() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1))
    made[0].bias.requires_grad = False  # DDP counts the parameters that want gradients, and only those
    return made


@pytest.mark.parametrize(
    ("indices", "names"),
    [
        ("1", "1.weight"),
        ("0 2 3", "0.weight, 2.weight, 2.bias"),
        ("3 99", "2.bias"),
    ],
)
def test_unused_parameters_get_their_names(indices: str, names: str) -> None:  # R1
    assert (
        explain_exception(RuntimeError(DDP.format(indices)), module(), ()) == f"parameters without a gradient: {names}"
    )


def test_ignored_parameters_are_not_counted() -> None:
    made = module()
    made._ddp_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
    assert explain_exception(RuntimeError(DDP.format("0")), made, ()) == "parameters without a gradient: 1.weight"


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (DDP.format("0"), None),
        (DDP.format("99"), module()),
        (DDP.format("(none)"), module()),
        ("out of memory", module()),
    ],
)
def test_nothing_to_add(text: str, model: Any) -> None:
    assert explain_exception(RuntimeError(text), model, list(collect_cards())) is None


def test_detached_gradients_name_the_setting() -> None:  # R2
    gradients = torch.zeros(4)[:2].requires_grad_().chunk(2)
    with pytest.raises(RuntimeError) as error:
        gradients[0].detach_()  # torch's own words, in this version
    line = explain_exception(error.value, module(), ["amp", "overlap"])
    assert line is not None and "rungs.overlap.gradient_as_bucket_view" in line and line.endswith("set it to false")
    assert explain_exception(error.value, module(), ["amp"]) is None, "a rung that is off is to blame for nothing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "use",
    [
        lambda short: torch.ones(2, 2) @ short,
        lambda short: torch.ones(2, 2).index_put_((torch.tensor([0]),), short[:1]),
        lambda short: torch.ones(2, 2).index_copy_(0, torch.tensor([0, 1]), short),
        lambda short: torch.nn.functional.linear(short, torch.ones(2, 2)),
    ],
)
def test_numbers_of_an_unexpected_type_name_the_rung_that_made_them(use: Any, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError) as error:  # torch's own words, in this version
        use(torch.ones(2, 2, dtype=dtype))
    line = explain_exception(error.value, module(), ["amp"])
    assert line is not None and "rungs.amp.keep_fp32" in line and line.endswith("write rungs.amp.enabled: false")
    assert explain_exception(error.value, module(), ["compile"]) is None


def test_types_that_the_user_mixed_up_are_none_of_a_rungs() -> None:
    for labels in (torch.ones(2), torch.ones(2, dtype=torch.int32)):
        with pytest.raises(RuntimeError) as error:
            torch.nn.functional.nll_loss(torch.ones(2, 2), labels)
        assert explain_exception(error.value, module(), ["amp"]) is None


def test_bfloat16_that_numpy_does_not_know_names_its_rung() -> None:
    with pytest.raises(TypeError) as error:
        torch.ones(1, dtype=torch.bfloat16).numpy()
    assert "call .float()" in (explain_exception(error.value, module(), ["amp"]) or "")


def test_what_failed_in_a_compiled_backward_names_its_rung() -> None:
    def as_it_is(graph: Any, _inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def broken_backward(graph: Any, _inputs: Any) -> Any:
        def run(_args: Any) -> Any:
            raise AssertionError("expected size 64==64, stride 1==4096 at dim=1")

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=as_it_is, bw_compiler=broken_backward)
    made = module()
    loss = torch.compile(lambda x: made(x).sum(), backend=backend)(torch.ones(4, 2))
    with pytest.raises(AssertionError, match="stride") as error:
        loss.backward()
    line = explain_exception(error.value, made, ["compile"])
    assert line is not None and line.endswith("write rungs.compile.enabled: false")
    assert explain_exception(error.value, made, ["amp"]) is None
    with pytest.raises(AssertionError) as plain:
        raise AssertionError("expected size 64==64, stride 1==4096 at dim=1")
    assert explain_exception(plain.value, made, ["compile"]) is None, "the words alone say nothing of who failed"


@pytest.mark.parametrize("said", ["CUDA out of memory. Tried to allocate 2 GiB", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_a_first_step_without_memory_is_told_what_waits_for_its_end(said: str) -> None:
    line = explain_exception(RuntimeError(said), None, [], ["amp"])
    assert line is not None and "without amp" in line and line.endswith("write rehearsal: off")
    assert explain_exception(RuntimeError(said), None, []) is None
    assert explain_exception(RuntimeError("shape mismatch"), None, [], ["amp"]) is None
