"""The ladder: order, one owner per setting, facts as earlier rungs leave them, verdicts."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from fastloop import ladder as ladders
from fastloop.errors import ConfigError, NotApplicable
from fastloop.ladder import Ladder, list_left_out, plan, read_manual, verify
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Step, Verdict

HEADINGS = ("Faster because", "Costs", "Don't use when", "Evidence", "Source")
NAMES = tuple(field.name for field in dataclasses.fields(Ladder))


def nothing(_site: Any) -> Applied:
    return Applied(undo=lambda: None)


@dataclass(frozen=True, kw_only=True)
class Fake:
    """A rung that wants what it is told."""

    enabled: bool = True
    change: Change = dataclasses.field(default_factory=Change)
    refuses: str | None = None
    seen: list[Facts] = dataclasses.field(default_factory=list)

    def plan(self, facts: Facts) -> Change:
        self.seen.append(facts)
        if self.refuses:
            raise NotApplicable(self.refuses)
        return self.change

    def verify(self, seen: Measurement) -> Verdict:
        return Verdict(took=True, why="it says so")


def fakes(**rungs: Fake) -> Any:
    made = dataclasses.make_dataclass(
        "Fakes", [(name, Fake, rung) for name, rung in rungs.items()], bases=(_Rungs,), frozen=True, kw_only=True
    )
    return made()


class _Rungs:
    rungs, enabled = Ladder.rungs, Ladder.enabled


def all_on() -> Ladder:
    """Every rung switched on, each with settings that can be planned."""
    chosen = {"batch": {"micro_batch": 4}}
    return Ladder(
        **{
            name: dataclasses.replace(rung, enabled=True, **chosen.get(name, {}))  # type: ignore[type-var]
            for name, rung in Ladder().rungs()
        }
    )


SITUATIONS = {
    "nothing known": Facts(),
    "a laptop": Facts(
        cpu_count=4,
        compiler="g++",
        compile_targets=("net",),
        convs=("net.0",),
        loader=LoaderFacts(kind="DataLoader", batch_size=8, batches=10),
    ),
    "a big machine": Facts(
        cpu_count=64,
        local_ranks=2,
        world_size=2,
        device="cuda",
        compute_capability=(9, 0),
        is_ddp=True,
        strategy="DDPStrategy",
        compiler="g++",
        compile_targets=("net",),
        convs=("net.0",),
        accumulate=4,
        loader=LoaderFacts(kind="DataLoader", batch_size=64, batches=100),
    ),
}


def test_the_order_is_the_order_of_the_fields() -> None:
    assert [name for name, _ in Ladder().rungs()] == list(NAMES)
    assert (
        *("dali", "cache", "nodes", "workers", "pin", "prefetch"),
        *("batch", "amp", "layout", "attention", "loss", "fused", "compile", "host", "overlap"),
    ) == NAMES
    assert Ladder().enabled() == () and all_on().enabled() == NAMES
    assert plan(Ladder(), Facts()).steps == ()
    assert [step.rung for step in plan(all_on(), Facts()).steps] == list(NAMES)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Change(wants={"loader.num_workers": 2}), Change(wants={"loader.num_workers": 2})),
        (
            Change(wants={"loader.num_workers": 2}),
            Change(actions=(Action(keys=("loader.num_workers",), when="model", do=nothing),)),
        ),
        (
            Change(actions=(Action(keys=("a", "loader.num_workers"), when="model", do=nothing),)),
            Change(actions=(Action(keys=("loader.num_workers", "b"), when="wrapped", do=nothing),)),
        ),
    ],
)
def test_two_owners_of_a_setting_are_a_conflict(first: Change, second: Change) -> None:
    with pytest.raises(ConfigError) as error:
        plan(fakes(dali=Fake(change=first), other=Fake(), nodes=Fake(change=second)), Facts())
    assert error.value.got == "rungs `dali` and `nodes` both set loader.num_workers"
    assert error.value.why == "only one rung may set it"
    assert error.value.do == "turn one of the two off"


def test_no_conflict_with_what_is_off_skipped_or_still_waiting() -> None:
    wants = Change(wants={"a": 1})
    for other in (
        Fake(change=wants, enabled=False),
        Fake(change=wants, refuses="not here"),
        Fake(change=dataclasses.replace(wants, waits_for="the train loader")),
    ):
        assert plan(fakes(one=Fake(change=wants), two=other), Facts()).wants == {"a": 1}


def test_later_rungs_see_the_facts_as_earlier_ones_leave_them() -> None:
    first = Fake(change=Change(facts={"accumulate": 1, "micro_batches": True}))
    skipped = Fake(change=Change(facts={"accumulate": 99}), refuses="not here")
    waiting = Fake(change=Change(facts={"precision": "bf16-mixed"}, waits_for="the train loader"))
    last, before = Fake(), Facts(accumulate=4)
    plan(fakes(first=first, skipped=skipped, waiting=waiting, last=last), before)
    assert first.seen == [before]
    assert skipped.seen == waiting.seen == [Facts(accumulate=1, micro_batches=True)]
    assert last.seen == [Facts(accumulate=1, micro_batches=True, precision="bf16-mixed")]


def test_a_rung_may_go_first_and_keeps_its_place_in_the_plan() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Eager(Fake):
        def goes_first(self, facts: Facts) -> bool:
            return facts.accumulate == 4

    for accumulate, changed in ((4, {"accumulate": 1, "micro_batches": True}), (2, {})):
        before = Facts(accumulate=accumulate)
        other, eager = Fake(), Eager(change=Change(facts={"accumulate": 1, "micro_batches": True}))
        made = plan(fakes(other=other, eager=eager), before)
        assert other.seen == [before.after(changed)] and [step.rung for step in made.steps] == ["other", "eager"]


def test_the_real_rungs_fold_their_facts() -> None:
    static = dataclasses.replace(all_on(), overlap=dataclasses.replace(all_on().overlap, static_graph=True))
    ranks = dataclasses.replace(SITUATIONS["a big machine"], accumulate=1, loader=None)
    split = plan(static, ranks).step("overlap")
    assert split is not None and split.reason is not None and "several backward passes" in split.reason
    whole = plan(dataclasses.replace(static, batch=Ladder().batch), ranks).step("overlap")
    assert whole is not None and whole.status == "planned"


def test_steps_say_what_became_of_each_rung() -> None:
    action = Action(keys=("b",), when="model", do=nothing)
    made = plan(
        fakes(
            on=Fake(change=Change(wants={"a": 1}, actions=(action,), parity="approximate")),
            off=Fake(enabled=False),
            waits=Fake(change=Change(waits_for="the train loader")),
            cannot=Fake(refuses="needs CUDA"),
        ),
        Facts(),
    )
    assert [(step.rung, step.status, step.reason) for step in made.steps] == [
        ("on", "planned", None),
        ("waits", "waiting", "waits for the train loader"),
        ("cannot", "skipped", "needs CUDA"),
    ]
    assert made.wants == {"a": 1} and made.parity == "approximate"
    assert made.step("cannot") is made.steps[2] and made.step("off") is None


def test_verdicts() -> None:
    waits = Fake(change=Change(waits_for="the train loader"))
    ladder = fakes(
        on=Fake(change=Change(parity="approximate")),
        off=Fake(enabled=False),
        cannot=Fake(refuses="needs CUDA"),
        waits=waits,
    )
    made = plan(ladder, Facts())
    assert verify(ladder, made, Measurement()) == (
        Verdict(rung="on", took=True, why="it says so", parity_class="approximate"),
        Verdict(rung="cannot", took=False, why="needs CUDA"),
        Verdict(rung="waits", took=False, why="waits for the train loader"),
    )
    given_up = dataclasses.replace(made, steps=(Step(rung="on", status="skipped"),))
    assert verify(ladder, given_up, Measurement()) == (Verdict(rung="on", took=False, why="not planned"),)


@pytest.mark.parametrize("name", NAMES)
def test_a_rung_without_evidence_never_took(name: str) -> None:
    verdict = getattr(all_on(), name).verify(Measurement())
    assert not verdict.took and verdict.why


@pytest.mark.parametrize("name", NAMES)
def test_every_manual_page_has_its_headings(name: str) -> None:
    lines = read_manual(name).splitlines()
    assert lines[0].endswith(".") and not lines[1]
    starts = [line[: len(heading)] for line in lines[2:] for heading in HEADINGS if line.startswith(heading)]
    assert tuple(starts) == HEADINGS


def test_rungs_left_out_are_listed_even_without_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -OO`` drops docstrings, and with them the manual pages."""
    with_pages = list_left_out(Ladder()).splitlines()
    assert all(
        line.startswith(f"* `rungs.{name}`: {read_manual(name).splitlines()[0]}")
        for line, name in zip(with_pages, NAMES, strict=True)
    )
    monkeypatch.setattr(ladders.inspect, "getdoc", lambda _module: None)
    assert [line.partition(":")[0] for line in list_left_out(Ladder()).splitlines()] == [
        f"* `rungs.{name}`" for name in NAMES
    ]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_planning_is_pure(situation: str) -> None:
    facts, ladder = SITUATIONS[situation], all_on()
    before = copy.deepcopy(facts)
    assert plan(ladder, facts) == plan(ladder, facts)
    assert facts == before
    assert plan(ladder, facts) != plan(ladder, dataclasses.replace(facts, device="mps"))  # plans can differ


def test_planning_needs_no_torch() -> None:
    code = """import sys, dataclasses
from fastloop.ladder import Ladder, plan, read_manual
from fastloop.records.plan import Facts
rungs = {name: dataclasses.replace(rung, enabled=True) for name, rung in Ladder().rungs()}
plan(Ladder(**rungs), Facts(convs=("a",), compiler="g++", compile_targets=("a",), is_ddp=True, world_size=2))
[read_manual(name) for name in rungs]
print(sorted({"torch", "lightning", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "[]"
    control = subprocess.run(
        [sys.executable, "-c", code.replace("import sys", "import torch, sys", 1)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "torch" in control.stdout


def test_the_protocol_is_what_the_rungs_have() -> None:
    for _, rung in Ladder().rungs():
        assert rung.enabled is False and callable(rung.plan) and callable(rung.verify)
    assert ladders.Rung.__doc__
