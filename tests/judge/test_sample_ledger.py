"""Two ledgers side by side."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fastloop.judge import sample_ledger
from fastloop.records.experiment import Gate
from fastloop.records.store import decode
from fastloop.records.trial import Ledger

PLAIN: dict[str, Any] = {"regrouped": False, "reshuffled": False, "parity_class": "exact"}
"""What the judge of ledgers is told of a rung that leaves batches and draws alone."""


def ledger_gate(pairs: list[tuple[Any, Any]], **settings: Any) -> Gate:
    """Of ledgers as their files hold them."""
    return sample_ledger.judge_ledger([(opened(base), opened(arm)) for base, arm in pairs], **{**PLAIN, **settings})


def opened(content: dict[str, Any]) -> Ledger:
    found = decode(content, Ledger)
    assert found is not None and len(found.steps) == len(content["steps"])
    return found


def ledger(rank: int = 0, **changes: Any) -> dict[str, Any]:
    """Four steps of 32 samples by 4 backwards, and a short last one."""
    steps = [[f"step {n}", 32, 4, [0.1 / (n + 1)]] for n in range(4)] + [["short", 8, 1, [0.01]]]
    return {"rank": rank, "ids": "sampler", "why": None, "steps": steps, "planned": [4, 4, 4, 4, 1], **changes}


def but(step: int, column: int, value: Any, of: dict[str, Any] | None = None) -> dict[str, Any]:
    changed = copy.deepcopy(ledger() if of is None else of)
    changed["steps"][step - 1][column] = value
    return changed


@pytest.mark.parametrize(
    ("arm", "step", "what", "says"),
    [
        (but(3, 0, "other"), 3, "samples", "in a different order"),
        (but(3, 1, 31), 3, "samples", "32 vs. 31 samples"),
        (but(2, 2, 3), 2, "backwards", "4 vs. 3"),
        (but(5, 2, 0), 5, "backwards", "1 vs. 0"),
        (but(4, 3, [0.1]), 4, "rates", "0.025 vs. 0.1"),
        (but(1, 3, [0.1, 0.1]), 1, "rates", "0.1 vs. 0.1, 0.1"),
        (ledger(steps=ledger()["steps"][:3]), 4, "steps", "5 vs. 3 optimizer steps"),
        (but(2, 3, [1.0], but(4, 2, 1)), 2, "rates", "optimizer step 2"),
        (but(4, 0, "other", but(4, 2, 1)), 4, "backwards", "optimizer step 4"),
    ],
    ids=["order", "samples", "a backward less", "none", "rate", "groups", "shorter", "the first of two", "both"],
)
def test_the_first_step_that_differs_is_named(arm: Any, step: int, what: str, says: str) -> None:
    gate = ledger_gate([(ledger(), ledger()), (ledger(), arm)])
    assert gate.name == "ledger" and gate.passed is False
    assert gate.detail == {"step": step, "differs": what} and says in gate.why


def test_the_same_passes_and_the_rank_of_a_difference_is_said() -> None:
    gate = ledger_gate([(ledger(), ledger()), (ledger(1), ledger(1))])
    assert gate.passed and gate.why.startswith("10 optimizer steps with the same samples, backwards")
    assert ledger_gate([(ledger(), ledger()), (ledger(1), but(2, 0, "other", ledger(1)))]).why.endswith("(rank 1)")


def test_a_rate_in_single_precision_is_the_same_rate() -> None:
    assert ledger_gate([(ledger(), but(1, 3, [0.10000000149011612]))]).passed
    assert ledger_gate([(ledger(), but(1, 3, [0.10001]))]).passed is False
    assert ledger_gate([(but(1, 3, [0.0]), but(1, 3, [0.0]))]).passed
    assert ledger_gate([(but(1, 3, [None]), but(1, 3, [None]))]).passed
    assert ledger_gate([(ledger(), but(1, 3, [None]))]).passed is False


def merged(planned: Any = (1, 1, 1, 1, 1)) -> dict[str, Any]:
    rows = [[name, count, 1, rates] for name, count, _, rates in ledger()["steps"]]
    return ledger(steps=rows, planned=None if planned is None else list(planned))


@pytest.mark.parametrize("planned", [(1, 1, 1, 1, 1), None], ids=["planned", "nothing planned"])
def test_other_micro_batches_make_the_backwards_of_their_own_plan(planned: Any) -> None:
    assert ledger_gate([(ledger(), merged(planned))]).passed is False
    assert ledger_gate([(ledger(), merged(planned))], regrouped=True).passed
    none = ledger_gate([(ledger(), but(3, 2, 0, merged(planned)))], regrouped=True)
    assert none.passed is False and none.detail["step"] == 3 and "0 backwards, but the arm's plan has 1" in none.why
    short = ledger_gate([(ledger(), but(5, 2, 0, merged(planned)))], regrouped=True)
    assert short.passed is False and short.detail["step"] == 5
    assert ledger_gate([(but(2, 2, 3), merged(planned))], regrouped=True).why.endswith("but the base's plan has 4")
    assert ledger_gate([(ledger(), but(4, 0, "other", merged(planned)))], regrouped=True).detail["differs"] == "samples"


def test_unknown_samples_are_no_pass_but_the_rest_still_fails() -> None:
    blind = ledger(ids=None, why="the batches are on the device already")
    gate = ledger_gate([(blind, blind)])
    assert gate.passed is None and gate.why == "not testable here: the batches are on the device already"
    assert gate.detail == {"testable": False}
    assert ledger_gate([(blind, but(3, 2, 1, blind))]).passed is False
    assert ledger_gate([(ledger(), blind)]).passed is None
    assert "identify their samples differently" in ledger_gate([(ledger(), ledger(ids="content"))]).why
    assert ledger_gate([]).passed is None and ledger_gate([(ledger(steps=[]), ledger(steps=[]))]).passed is None


def test_backwards_that_nobody_could_count_are_not_compared() -> None:
    assert ledger_gate([(ledger(), but(1, 2, None))]).passed
    assert ledger_gate([(ledger(), but(1, 2, None, merged()))], regrouped=True).passed


def test_other_content_may_be_augmentation() -> None:
    base, arm = ledger(ids="content"), but(2, 0, "other", ledger(ids="content"))
    assert ledger_gate([(base, base)]).passed and ledger_gate([(base, arm)]).passed is False
    gate = ledger_gate([(base, arm)], parity_class="approximate")
    assert gate.passed is None and "augmentation" in gate.why
    assert ledger_gate([(base, but(2, 1, 31, base))], parity_class="approximate").passed is False
    assert ledger_gate([(ledger(), but(2, 0, "other"))], parity_class="approximate").passed is False


# -- another shuffle from the second epoch on -------------------------------------------------------------------------


def epochs(**changes: Any) -> dict[str, Any]:
    """Two whole epochs of two steps each, and a part of a third."""
    rows = [[2, 64, True, "all", 0], [4, 64, True, "all", 0], [5, 8, False, "some", 0]]
    return ledger(**{"epochs": rows, "dataset": 64, "own_order": False, **changes})


def another(**changes: Any) -> dict[str, Any]:
    arm = epochs(**changes)
    arm["epochs"][2][3] = "others"
    return but(5, 0, "e", but(4, 0, "d", but(3, 0, "c", arm)))


def test_another_order_after_the_first_epoch() -> None:
    gate = ledger_gate([(epochs(), another()), (epochs(), another())], reshuffled=True)
    assert gate.passed and gate.detail == {"steps": 10, "reshuffled": True}
    assert gate.why == (
        "10 optimizer steps with the same backwards and learning rates; the first epoch is equal, later ones have the"
        " same samples in a different order"
    )
    strict = ledger_gate([(epochs(), another())])
    assert strict.passed is False and strict.detail == {"step": 3, "differs": "samples"}
    same = ledger_gate([(epochs(), epochs())], reshuffled=True)
    assert same.passed and same.why == "5 optimizer steps with the same samples, backwards and learning rates"


@pytest.mark.parametrize(
    ("arm", "step", "what"),
    [
        (but(2, 0, "b", another()), 2, "samples"),
        (but(4, 1, 31, another()), 4, "samples"),
        (but(4, 2, 3, another()), 4, "backwards"),
        (but(4, 3, [0.5], another()), 4, "rates"),
        (but(3, 0, "c", ledger()), 3, "samples"),
        (another(own_order=True), 3, "samples"),
    ],
    ids=["first epoch", "count", "backwards", "rates", "no epochs known", "an order of its own"],
)
def test_all_else_stays_equal(arm: Any, step: int, what: str) -> None:
    gate = ledger_gate([(epochs(), arm)], reshuffled=True)
    assert gate.passed is False and gate.detail == {"step": step, "differs": what}


def test_other_samples_in_a_later_epoch() -> None:
    arm = another()
    arm["epochs"][1][3] = "other"
    gate = ledger_gate([(epochs(), arm)], reshuffled=True)
    assert gate.passed is False and gate.detail == {"step": 4, "differs": "samples"}
    assert ledger_gate([(arm, epochs())], reshuffled=True).passed is False


def test_another_order_in_other_micro_batches() -> None:
    rows = [[name, count, 1, rates] for name, count, _, rates in another()["steps"]]
    gate = ledger_gate([(epochs(), another() | {"steps": rows, "planned": [1] * 5})], reshuffled=True, regrouped=True)
    assert gate.passed and "as many backwards as planned; the first epoch is equal" in gate.why


def test_another_order_of_what_is_known_by_content_is_not_testable() -> None:
    gate = ledger_gate([(epochs(ids="content"), another(ids="content"))], reshuffled=True)
    assert gate.passed is None and "from the second epoch on" in gate.why
    wrong = but(1, 0, "a", another(ids="content"))
    assert ledger_gate([(epochs(ids="content"), wrong)], reshuffled=True).passed is False
