"""Which rung is tried next, and which never again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.experiments.climb import candidates
from fastloop.experiments.climb.candidates import Candidate, Position, Start, choose, list_ladders, make_patch
from fastloop.records.card import Stack
from fastloop.records.climb import Attempt, Costs
from fastloop.records.experiment import Outcome
from fastloop.rungs import dali

GPU = Start(on_cuda=True, micro_batch=64, rank_batch=256)
WAITS = Costs(now_ms=743, replayed_ms=130, resident_ms=120, loader_ms=700)
COMPUTES = Costs(now_ms=1580, replayed_ms=1579, resident_ms=1578, loader_ms=5, mfu=0.04)


def row(
    key: str, ended: str, *, at: int = 0, predicted: float | None = 50.0, rung: str | None = None, **more: Any
) -> Attempt:
    rung = rung or key.partition("-")[0]
    return Attempt(
        rung=rung,
        key=key,
        ended=ended,
        kept=ended == "kept",
        at=at,
        family="compute",
        predicted_saved_ms=predicted,
        patch={"rungs": {rung: {"enabled": True}}},
        **more,
    )


def choice(costs: Costs, *rows: Attempt, start: Start = GPU, stack: Stack | None = None) -> Candidate | str:
    """For a model without attention and without a large vocabulary."""
    start = dataclasses.replace(start, enabled=start.enabled | {"attention", "loss"})
    return choose(Position(start=start, costs=costs, stack=stack or {}, rows=rows))


def key(found: Candidate | str) -> str:
    assert isinstance(found, Candidate), found
    return found.key


def test_a_number_that_came_along_with_another_rung_counts_as_chosen() -> None:
    stack = {"workers": {"enabled": True, "count": 12}, "amp": {"enabled": True}}
    binds = Costs(now_ms=100, replayed_ms=60, resident_ms=55, loader_ms=100, workers=12)
    first = dataclasses.replace(row("workers", "kept"), tuned={"rungs.workers.count": 4})
    alone = row("amp", "kept", at=1)
    along = dataclasses.replace(alone, tuned={"rungs.workers.count": 12})
    assert key(choice(binds, first, alone, stack=stack)) == "workers-count"
    assert key(choice(binds, first, along, stack=stack)) != "workers-count", "it was chosen for this stack"


# -- families ---------------------------------------------------------------------------------------------------------


def test_the_largest_ceiling_comes_first() -> None:
    assert key(choice(WAITS)) == "workers" and key(choice(COMPUTES)) == "amp"
    exchange = COMPUTES.but(now_ms=100, replayed_ms=99, resident_ms=99, alone_ms=30, mfu=0.5)
    assert key(choice(exchange)) == "overlap"


def test_within_a_family_in_the_order_of_the_ladder() -> None:
    tried = []
    for _ in range(5):
        tried.append(
            key(
                choice(
                    COMPUTES,
                    *(row(each, "crashed") for each in tried if each != "amp-tf32"),
                    *(row(each, "small") for each in tried if each == "amp-tf32"),
                )
            )
        )
    assert tried == ["amp", "amp-tf32", "layout", "fused", "compile"]


def test_what_the_user_has_switched_on_is_his() -> None:
    start = Start(
        on_cuda=True,
        enabled=frozenset({"amp", "layout", "fused", "compile", "batch", "workers", "pin", "prefetch"}),
        micro_batch=64,
        rank_batch=256,
    )
    found = choice(COMPUTES, start=start)
    assert (
        isinstance(found, str)
        and "nothing to gain: no remaining rung" in found
        and "(upper bound: 96 %, compute)" in found
    )


def test_no_ceiling_nothing_to_gain() -> None:
    peak = Costs(now_ms=100, replayed_ms=99, resident_ms=98.5, loader_ms=5, mfu=0.99)
    assert choice(peak) == "nothing to gain: no ceiling is above 3 %"
    found = choice(peak, row("amp", "kept"))
    assert found == "no ceiling is above 3 %", "something was gained on the way"
    faster = {"measured_saved_ms": 5.0, "parity": Outcome(passed=False)}
    assert choice(peak, row("amp", "parity", **faster)) == "no ceiling is above 3 %", "something could be gained"


# -- again or never ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", ["odd", "undecided"])
def test_without_an_answer_nobody_knows_that_there_is_nothing_to_gain(ended: str) -> None:
    peak = Costs(now_ms=100, replayed_ms=99, resident_ms=98.5, loader_ms=5, mfu=0.99)
    assert choice(peak, row("amp", ended)) == "no ceiling is above 3 %"
    assert choice(peak, row("amp", ended), row("amp", "not_faster")) == "nothing to gain: no ceiling is above 3 %"


@pytest.mark.parametrize("ended", ["small", "not_faster", "undecided", "odd"])
def test_what_was_not_faster_is_tried_once_more_on_a_higher_stack(ended: str) -> None:
    first = row("amp", ended)
    assert key(choice(COMPUTES, first)) == "layout"
    higher = [first, row("layout", "kept")]
    assert key(choice(COMPUTES, *higher)) == "amp"
    assert key(choice(COMPUTES, *higher, row("amp", ended, at=1))) == "fused"
    assert key(choice(COMPUTES, *higher, row("amp", ended, at=1), row("fused", "kept", at=1))) == "compile"


@pytest.mark.parametrize("ended", ["crashed", "parity", "inactive", "class"])
def test_what_broke_is_not_tried_again(ended: str) -> None:
    tried = [row("amp", ended), row("amp-tf32", "crashed"), row("layout", "kept")]
    assert key(choice(COMPUTES, *tried)) == "fused"


@pytest.mark.parametrize(("predicted", "then"), [(-800.0, "fused"), (-700.0, "amp")])
def test_what_would_cost_half_a_step_is_not_asked_again(predicted: float, then: str) -> None:
    assert key(choice(COMPUTES, row("amp", "small", predicted=predicted), row("layout", "kept"))) == then


def test_tf32_is_for_those_whom_bf16_breaks() -> None:
    found = choice(COMPUTES, row("amp", "parity"))
    assert isinstance(found, Candidate) and found.patches == ({"rungs": {"amp": {"enabled": True, "mode": "tf32"}}},)
    assert key(choice(COMPUTES, row("amp", "not_faster"))) == "layout"


# -- single rungs -----------------------------------------------------------------------------------------------------


def test_a_loader_with_workers_keeps_its_number() -> None:
    found = choice(WAITS.but(workers=4), start=Start(on_cuda=True, refused={"workers": "already has 4 workers"}))
    assert isinstance(found, Candidate) and found.rung == "workers" and found.refused
    assert "already has 4 workers" in found.refused


def test_an_engine_for_image_files_is_screened_without_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "is_installed", lambda: True)
    files = dataclasses.replace(GPU, image_files=True)
    tried = [row(each, "small", predicted=0.0) for each in ("workers", "pin", "prefetch")]
    assert key(choice(WAITS, start=files)) == "workers", "what is predicted comes first"
    found = choice(WAITS, *tried, start=files)
    assert isinstance(found, Candidate) and found.key == "dali" and found.way.changes == "engine"
    assert key(choice(WAITS, *tried, row("dali", "not_faster"), start=files)) == "cache-device"
    tried.append(row("cache-device", "inactive"))
    assert key(choice(WAITS, *tried, row("dali", "not_faster"), start=files)) == "nodes"
    assert key(choice(WAITS, *tried)) == "nodes", "no image files"
    monkeypatch.setattr(dali, "is_installed", lambda: False)
    assert key(choice(WAITS, *tried, start=files)) == "nodes"


def test_pictures_on_the_device_take_the_place_of_what_loads_now() -> None:
    files = dataclasses.replace(GPU, image_files=True)
    kept = row("dali", "kept"), row("amp", "kept", at=1)
    stack: Stack = {"dali": {"enabled": True}, "amp": {"enabled": True}}
    still = WAITS.but(now_ms=200.0)
    found = choice(
        still,
        *kept,
        *(row(each, "inactive", at=2) for each in ("dali-mixed", "workers", "pin", "prefetch")),
        start=files,
        stack=stack,
    )
    assert isinstance(found, Candidate) and found.key == "cache-device"
    (patch,) = found.patches
    assert patch["rungs"] == {"cache": {"enabled": True, "store": "device"}, "dali": {"enabled": False}}
    assert candidates.apply_patch(stack, patch) == {"amp": {"enabled": True}, "cache": patch["rungs"]["cache"]}

    stored = dataclasses.replace(row("cache-device", "kept", at=2), patch=patch)
    assert not stored.is_removal, "it adds a rung"
    rows, on = [*kept, stored], candidates.read_stack([*kept, stored])
    assert candidates.list_replaced(rows) == {"dali"}
    for _ in range(12):
        found = choice(still, *rows, start=files, stack=on)
        if not isinstance(found, Candidate):
            break
        assert found.rung != "dali", "it would have no effect"
        rows.append(row(found.key, "inactive", at=3))
    assert isinstance(found, str)


def test_samples_that_come_again_within_a_trial_may_be_kept() -> None:
    tried = [row(each, "small", predicted=0.0) for each in ("workers", "pin", "prefetch", "nodes")]
    found = choice(WAITS.but(outside_ms=1.0, gap_ms=0.1), *tried)
    assert isinstance(found, Candidate) and found.key == "cache" and found.way.changes == "engine"
    once = choice(WAITS, *tried)
    assert not isinstance(once, Candidate) or once.rung != "cache", "within one epoch none comes again"


def test_a_script_keeps_its_loader_to_itself_so_workers_are_screened_at_once() -> None:
    found = choice(WAITS, start=dataclasses.replace(GPU, times_loader=False))
    assert isinstance(found, Candidate) and found.rung == "workers" and found.patches == (make_patch("workers"),)
    assert found.way.changes == "engine" and found.tunes is None


BF16: Stack = {"workers": {"enabled": True}, "amp": {"enabled": True}}
FULL: Stack = {**BF16, "compile": {"enabled": True}}


def test_rungs_that_pay_together_are_tried_on_top_of_a_ladder() -> None:
    """Replayed steps wait for data, and pictures on the device for launches: by itself neither makes a step shorter."""
    full = {**FULL, "batch": {"enabled": True}}
    bound = Start(on_cuda=True, micro_batch=128, rank_batch=128, image_files=True, ladders={"bf16": BF16, "full": full})
    known = Position(start=bound, costs=WAITS.but(launch_bound=True), stack={})
    (name,) = bundles = candidates.list_bundles(known)
    assert name == "full+cache+host" and bundles[name] == {
        **FULL,  # without `batch`: there is nothing to merge
        "cache": {"enabled": True, "store": "device"},
        "host": {"enabled": True, "step_graph": "auto"},
    }
    rates = {"full": 90.0, "bf16": 110.0, name: 300.0}
    found = choose(dataclasses.replace(known, ladder_rates=rates))
    assert isinstance(found, Candidate) and found.key == f"ladder-{name}" and found.whole
    assert found.ladder is None, (
        "its rungs are asked for by name: kernels that are slower alone are not slower replayed"
    )
    slow = choose(dataclasses.replace(known, ladder_rates={**rates, name: 20.0}))
    assert isinstance(slow, Candidate) and (slow.key, slow.ladder) == ("ladder-bf16", "bf16")

    top = dataclasses.replace(
        row(f"ladder-{name}", "kept", rung="+".join(bundles[name])), patch={"rungs": bundles[name]}
    )
    on = candidates.read_stack([top])
    rest = candidates._choose_rest(dataclasses.replace(known, rows=[top], stack=on))
    assert rest is None, "all of `full` was in it"
    for start in (dataclasses.replace(bound, image_files=False), dataclasses.replace(bound, ladders={})):
        assert candidates.list_bundles(dataclasses.replace(known, start=start)) == {}
    assert candidates.list_bundles(dataclasses.replace(known, costs=WAITS)) == {}, "launches do not limit it"


def test_of_the_shipped_ladders_the_fastest_comes_first() -> None:
    shipped = dataclasses.replace(GPU, ladders={"bf16": BF16, "full": FULL, "twin": FULL})
    assert list(list_ladders(shipped)) == ["full", "bf16"], "the largest first, and each addition once"
    known = Position(start=shipped, costs=WAITS, stack={}, ladder_rates={"full": 90.0, "bf16": 110.0})
    assert key(choose(known)) == "ladder-bf16"
    equal = dataclasses.replace(known, ladder_rates={"full": 111.0, "bf16": 110.0})
    assert key(choose(equal)) == "ladder-bf16", "the shorter one of two that are equally fast"
    slower = dataclasses.replace(row("ladder-bf16", "not_faster", rung="workers+amp"), patch={"rungs": BF16})
    assert key(choose(dataclasses.replace(known, rows=[slower]))) == "ladder-full"
    broken = dataclasses.replace(known, rows=[dataclasses.replace(slower, ended="parity")])
    assert key(choose(broken)) == "workers", "full has all of what broke"
    kept = row("ladder-bf16", "kept", rung="workers+amp")
    high = dataclasses.replace(known, rows=[dataclasses.replace(kept, patch={"rungs": BF16})], stack=BF16)
    assert key(choose(high)) == "ladder-full", "its first run was faster than what is kept"
    none = dataclasses.replace(high, ladder_rates={})
    assert key(choose(none)) not in ("ladder-full", "workers", "amp"), "slower ones are left out, and what it brought"
    tried = dataclasses.replace(high, rows=[*high.rows, dataclasses.replace(slower, key="ladder-full")])
    assert key(choose(tried)) != "ladder-full"
    own = dataclasses.replace(shipped, enabled=frozenset({"amp"}), refused={"compile": "there is no compiler"})
    assert list_ladders(own) == {}, "one rung is no ladder"


@pytest.mark.parametrize(("saved", "rest"), [(-20.0, {"dali", "fused", "layout"}), (-30.0, {"fused", "layout"})])
def test_what_made_the_step_much_longer_is_not_tried_with_the_rest_of_its_ladder(saved: float, rest: set[str]) -> None:
    whole = {rung: {"enabled": True} for rung in ("pin", "dali", "layout", "fused")}
    start = Start(ladders={"full": whole}, enabled=frozenset(candidates.collect_cards()) - {*whole})
    costs = Costs(now_ms=50, replayed_ms=20, resident_ms=20, loader_ms=45)
    rows = [row("pin", "kept"), row("dali", "not_faster", at=1, measured_saved_ms=saved)]
    rows += [row(each, "not_faster", at=1) for each in ("layout", "fused")]
    found = choose(Position(start=start, costs=costs, stack={"pin": {"enabled": True}}, rows=rows))
    assert isinstance(found, Candidate) and set(found.patches[0]["rungs"]) == rest, found


def test_workers_are_counted_anew_once_more_is_asked_of_them() -> None:
    loads = Costs(now_ms=90, replayed_ms=50, resident_ms=50, loader_ms=88, workers=8)
    stack: Stack = {"workers": {"enabled": True}, "amp": {"enabled": True}}
    copies = [row(each, "small", at=2, predicted=0.0) for each in ("pin", "prefetch")]
    tried = [row("workers", "kept"), row("amp", "kept", at=1), *copies]
    assert key(choice(loads, *tried, stack=stack)) == "workers-count"
    eight = {**stack, "workers": {"enabled": True, "count": 8}}
    assert key(choice(loads.but(loaders_ms=((8, 88.0), (16, 60.0))), *tried, stack=eight)) == "workers-count"
    most, threads = loads.but(loaders_ms=((4, 160.0), (8, 88.0))), row("nodes", "not_faster", at=2)
    assert key(choice(most, *tried, stack=eight)) == "nodes", "threads, once processes have given what they can"
    assert isinstance(choice(most, *tried, threads, stack=eight), str), "no more to ask"
    counted = row("workers-count", "small", at=2)
    assert isinstance(choice(loads, *tried, counted, threads, stack=stack), str)
    assert key(choice(loads, *tried, counted, threads, row("layout", "kept", at=2), stack=stack)) == "workers-count"


def test_workers_that_start_anew_each_epoch_may_persist() -> None:
    gaps = Costs(now_ms=12, outside_ms=4, gap_ms=2, replayed_ms=5, resident_ms=5, loader_ms=8, workers=8)
    found = choice(gaps, row("workers", "kept"), stack={"workers": {"enabled": True}})
    assert key(found) == "workers-persistent"
    assert isinstance(found, Candidate) and found.patches[0]["rungs"]["workers"]["persistent"] is True


def test_the_users_own_workers_may_stay_between_epochs() -> None:
    """The rung refuses to start others. A GAN's climb left its workers to start anew."""
    gaps = Costs(now_ms=12, outside_ms=4, gap_ms=2, replayed_ms=5, resident_ms=5, loader_ms=8, workers=8)
    start = dataclasses.replace(GPU, refused={"workers": "yours stand"}, may_keep_workers=True)
    theirs = row("workers", "inactive")
    found = choice(gaps, theirs, start=start)
    assert key(found) == "workers-persistent" and isinstance(found, Candidate) and found.refused is None
    assert found.patches[0]["rungs"]["workers"] == {"enabled": True, "persistent": True, "across_epochs": True}
    for other in (dataclasses.replace(start, may_keep_workers=False), start):
        costs = gaps.but(gap_ms=0.1) if other is start else gaps
        assert key(choice(costs, theirs, start=other)) != "workers-persistent"


def test_a_ladder_keeps_the_users_own_workers() -> None:
    """As it does by name in a run; otherwise it would be judged without."""
    safe: Stack = {each: {"enabled": True} for each in ("workers", "pin")}
    start = dataclasses.replace(GPU, refused={"workers": "yours stand"}, ladders={"safe": safe, "one": {"pin": {}}})
    assert candidates.list_ladders(start) == {}
    found = candidates.list_ladders(dataclasses.replace(start, may_keep_workers=True))
    assert found == {
        "safe": {"workers": {"enabled": True, "persistent": True, "across_epochs": True}, "pin": {"enabled": True}}
    }


def test_the_users_own_workers_may_become_more() -> None:
    start = dataclasses.replace(GPU, refused={"workers": "yours stand"}, may_have_more_workers=True)
    found = choice(WAITS, row("workers", "inactive"), start=start)
    assert key(found) == "workers-grow" and isinstance(found, Candidate) and found.refused is None
    assert found.patches[0]["rungs"]["workers"] == {"enabled": True, "grow": True}
    other = choice(WAITS, row("workers", "inactive"), start=dataclasses.replace(start, may_have_more_workers=False))
    assert key(other) != "workers-grow"


def test_only_a_ladder_that_lets_them_grow_has_more_workers() -> None:
    pin = {"pin": {"enabled": True}, "amp": {"enabled": True}}
    ladders: dict[str, Stack] = {
        "safe": {"workers": {"enabled": True}, **pin},
        "full": {"workers": {"enabled": True, "grow": True}, **pin},
    }
    start = dataclasses.replace(GPU, refused={"workers": "yours stand"}, ladders=ladders)
    found = candidates.list_ladders(dataclasses.replace(start, may_have_more_workers=True))
    assert found == {"full": ladders["full"], "safe": pin}
    assert list(candidates.list_ladders(start).values()) == [pin]


def test_what_the_start_shows_to_be_refused_says_so() -> None:
    start = Start(micro_batch=64, rank_batch=256, refused={"pin": "needs CUDA"})
    found = choice(WAITS, row("workers", "crashed"), start=start)
    assert isinstance(found, Candidate) and found.rung == "pin" and found.refused == "needs CUDA"
    found = choice(WAITS, row("workers", "crashed"), row("pin", "inactive"), start=start)
    assert isinstance(found, Candidate) and found.rung == "prefetch" and found.refused is None


@pytest.mark.parametrize(
    ("micro", "whole", "sizes", "tunes"),
    [(8, 64, [64, 32], "batch"), (64, 128, [128], None), (64, 192, [192], None), (64, 256, [256, 128], "batch")],
)
def test_micro_batches_never_change_the_batch(micro: int, whole: int, sizes: list[int], tunes: str | None) -> None:
    tried = [row(each, "small") for each in ("amp", "layout", "fused", "compile")]
    start = Start(on_cuda=True, micro_batch=micro, rank_batch=whole)
    found = choice(COMPUTES, *tried, start=start)
    assert isinstance(found, Candidate) and found.rung == "batch" and found.family == "fill" and not found.way.every
    assert [patch["rungs"]["batch"]["micro_batch"] for patch in found.patches] == sizes and found.tunes == tunes


def test_a_step_of_one_batch_is_filled_already() -> None:
    tried = [row(each, "small", predicted=0.0) for each in ("amp", "layout", "fused", "compile")]
    found = choice(COMPUTES, *tried, start=Start(on_cuda=True, micro_batch=128, rank_batch=128))
    assert isinstance(found, Candidate) and found.refused and "already one micro-batch" in found.refused


@pytest.mark.parametrize(
    ("launch_bound", "rank_batch", "modes"),
    [(True, 64, [None, "reduce-overhead"]), (True, 256, [None]), (False, 64, [None]), (None, 64, [None])],
)
def test_graphs_are_for_launch_bound_steps_of_one_backward(
    launch_bound: bool | None, rank_batch: int, modes: list[str | None]
) -> None:
    start, costs = Start(on_cuda=True, micro_batch=64, rank_batch=rank_batch), COMPUTES.but(launch_bound=launch_bound)
    replays = len(modes) > 1
    assert key(choice(costs, start=start)) == ("host" if replays else "amp"), (
        "launches first: faster kernels hide there"
    )
    tried = [row(each, "small") for each in ("host", "amp", "layout", "fused")]
    found = choice(costs, *tried, start=start)
    assert isinstance(found, Candidate) and found.rung == "compile"
    assert [patch["rungs"]["compile"].get("mode") for patch in found.patches] == modes


@pytest.mark.parametrize(("allow", "hooks"), [((), ["bf16"]), (("changes-training",), ["bf16", "powersgd"])])
def test_what_changes_the_training_is_tried_only_where_allowed(allow: tuple[str, ...], hooks: list[str]) -> None:
    exchange = Costs(now_ms=100, replayed_ms=99, resident_ms=99, alone_ms=30, loader_ms=5, mfu=0.99)
    start, tried = Start(on_cuda=True, devices=2, allow=frozenset(allow)), [row("overlap", "small")]
    found = []
    while isinstance(chosen := choice(exchange, *tried, start=start), Candidate):
        found.append(chosen.patches[0]["rungs"]["overlap"]["comm_hook"])
        tried.append(row(chosen.key, "small"))
    assert found == hooks


# -- together ---------------------------------------------------------------------------------------------------------


def test_small_gains_are_tried_together_once() -> None:
    tried = [row(each, "small", predicted=25.0) for each in ("amp", "layout", "fused", "compile", "batch")]
    found = choice(COMPUTES, *tried)
    assert isinstance(found, Candidate) and found.rung == "amp+layout+fused+compile+batch"
    assert set(found.patches[0]["rungs"]) == {"amp", "layout", "fused", "compile", "batch"}
    assert isinstance(choice(COMPUTES, *tried, row(found.key, "small", predicted=40.0, rung=found.rung)), str)


def test_gains_too_small_even_together_are_left() -> None:
    tried = [row(each, "small", predicted=8.0) for each in ("amp", "layout", "fused", "compile", "batch")]
    assert isinstance(choice(COMPUTES, *tried), str), "40 of 1580 ms"
    slower = [row(each, "small", predicted=-30.0) for each in ("amp", "layout", "fused", "compile", "batch")]
    assert isinstance(choice(COMPUTES, *slower), str)


def test_what_had_no_effect_beside_the_last_one_is_not_asked_about() -> None:
    kept = row("dali", "kept", idle={"workers": "DALI loads the samples", "pin": "there is no copy"})
    stack = {"dali": {"enabled": True}}
    chosen = choice(WAITS, kept, stack=stack)
    assert not isinstance(chosen, Candidate) or chosen.rung not in ("workers", "pin")
    later = choice(WAITS, kept, row("amp", "kept", at=1), stack={**stack, "amp": {"enabled": True}})
    assert isinstance(later, Candidate) and later.rung in ("workers", "pin"), "beside another one it may have"
    asked = choice(WAITS, row("dali", "kept"), stack=stack)
    assert isinstance(asked, Candidate) and asked.rung in ("workers", "pin")
