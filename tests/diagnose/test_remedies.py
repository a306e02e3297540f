"""What can be switched on: never what is on, never what cannot apply, and always what the configuration takes."""

from __future__ import annotations

import dataclasses

import pytest

from fastloop.config.loading import load_callback_config
from fastloop.diagnose.remedies import Rungs, list_next_steps
from fastloop.ladder import collect_cards
from fastloop.records.card import Card
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding, Verdict
from tests.diagnose.scenes import cifar10_launches, gpt2_naive, on_cpu, resnet50_naive, with_trace

CARDS = collect_cards()
RUNGS = list(CARDS)
SPLIT = {"micro_batch": 8, "global_batch": 64}


def available(seen: Measurement, enabled: tuple[str, ...], rung: str) -> bool:
    return Rungs(cards=CARDS, enabled=enabled).is_available(seen, rung)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_patch_is_one_the_configuration_takes(rung: str) -> None:
    patch = {"rungs": {rung: CARDS[rung].patch(gpt2_naive())}}
    config, _ = load_callback_config(patch)
    assert config.ladder.enabled() == (rung,)


@pytest.mark.parametrize("rung", RUNGS)
def test_what_is_on_is_not_available(rung: str) -> None:
    seen = resnet50_naive(world_size=2, micro_batch=8, global_batch=64)
    more = {"loader": {**seen.evidence["loader"], "decode_ms": 4.1}, "model": {"attends_by_hand": 1, "classes": 9000}}
    seen = dataclasses.replace(seen, evidence={**seen.evidence, **more})
    assert available(seen, (), rung), "otherwise this tests nothing"
    assert not available(seen, (rung,), rung)


@pytest.mark.parametrize(
    ("rung", "seen"),
    [
        ("workers", resnet50_naive(loader={"num_workers": 2, "map_style": True})),
        ("workers", resnet50_naive(loader={"num_workers": 0, "map_style": False})),
        ("pin", on_cpu()),
        ("pin", resnet50_naive(loader={"num_workers": None})),
        ("pin", resnet50_naive(loader={"pin_memory": True})),
        ("prefetch", on_cpu()),
        ("batch", cifar10_launches()),
        ("amp", cifar10_launches()),
        ("amp", on_cpu()),
        ("amp", gpt2_naive(precision="64-true", peaks={})),
        ("amp", gpt2_naive(precision=None, peaks={})),
        ("layout", gpt2_naive()),
        ("layout", resnet50_naive(evidence={"model": {"channels_last": True}})),
        ("fused", resnet50_naive(evidence={"model": {"fused": True}})),
        ("fused", on_cpu()),
        ("compile", on_cpu()),
        ("compile", resnet50_naive(evidence={"model": {"compiled": True}})),
        ("overlap", gpt2_naive()),
        ("compile", with_trace(gpt2_naive(), 9.0, {}, {}, top=[{"name": "triton_red_fused_1"}])),
    ],
)
def test_what_cannot_apply_is_not_available(rung: str, seen: Measurement) -> None:
    assert not available(seen, (), rung)


@pytest.mark.parametrize(
    "seen",
    [
        resnet50_naive(),
        with_trace(resnet50_naive(flops={}), 9.0, {}, {"convolution": 5.0}),
        resnet50_naive(flops={}, evidence={"model": {"convs": 53}}),
    ],
    ids=["counted", "traced", "looked at"],
)
def test_convolutions_are_known_from_work_trace_or_model(seen: Measurement) -> None:
    assert available(seen, (), "layout")
    assert not available(resnet50_naive(flops={}), (), "layout"), "not known to have any"


@pytest.mark.parametrize(("micro", "whole", "world", "proposed"), [(8, 64, 1, 64), (8, 64, 2, 32), (4, 256, 1, 32)])
def test_a_micro_batch_grows_up_to_the_step_and_eightfold(micro: int, whole: int, world: int, proposed: int) -> None:
    seen = gpt2_naive(micro_batch=micro, global_batch=whole, world_size=world)
    assert CARDS["batch"].patch(seen) == {"enabled": True, "micro_batch": proposed}


def test_the_first_that_is_free_or_all_of_them() -> None:
    seen, rungs = resnet50_naive(), Rungs(cards=CARDS)
    assert rungs.choose(seen, "h2d", "-").patch == {"rungs": {"pin": {"enabled": True}}}
    both = rungs.choose(seen, "h2d", "-", together=True)
    assert both.patch is not None and list(both.patch["rungs"]) == ["pin", "prefetch"]
    none = rungs.choose(on_cpu(), "h2d", "do this")
    assert none == (None, "no rung helps with this: do this")
    on = Rungs(cards=CARDS, enabled=("pin", "prefetch"))
    assert on.choose(seen, "h2d", "do this").says == "no further rung helps with this: do this"


@pytest.mark.parametrize(
    ("took", "says"),
    [
        (False, "no rung helps with this: pin is enabled but inactive (the batches are pinned already); do this"),
        (None, "no rung helps with this: pin is on, but whether it had an effect is unknown (the batches are"),
        (True, "no further rung helps with this: do this"),
    ],
)
def test_a_rung_that_is_on_without_an_effect_says_why(took: bool | None, says: str) -> None:
    verdicts = {"pin": Verdict(rung="pin", took=took, why="the batches are pinned already")}
    on = Rungs(cards=CARDS, enabled=("pin", "prefetch"), verdicts=verdicts)
    assert on.choose(resnet50_naive(), "h2d", "do this").says.startswith(says)


def test_a_rung_that_is_only_a_card_is_proposed_advises_and_comes_after_others() -> None:
    """Diagnosis names no rung: what it does not know it takes from the cards."""
    new = Card(
        family="feed",
        does="it does",
        answers={"data_wait": 1},
        follows={"launch_bound": 1},
        applies=lambda seen: seen.steps < 300,
        advice={"data_wait": lambda _seen, on: "turn it up" if on else None},
    )
    seen, only = resnet50_naive(), {"new": new}
    assert Rungs(cards=only).choose(seen, "data_wait", "-") == ({"rungs": {"new": {"enabled": True}}}, "it does")
    assert (
        Rungs(cards=only).choose(dataclasses.replace(seen, steps=300), "data_wait", "-").says
        == "no rung helps with this: -"
    )
    on = Rungs(cards=only, enabled=("new",))
    assert on.choose(seen, "data_wait", "-").says == "no further rung helps with this: turn it up"
    assert Rungs(cards={**CARDS, **only}).list_after("launch_bound") == ["batch", "new", "host", "fused", "compile"]


@pytest.mark.parametrize(
    ("loader", "patched", "then"),
    [
        ({}, "workers", ["dali", "cache", "prefetch", "pin"]),
        ({"decode_ms": 40.0}, "dali", []),
        ({"rows": "TensorDataset"}, "cache", []),
    ],
)
def test_after_an_engine_no_rung_for_loaders_comes_next(
    loader: dict[str, object], patched: str, then: list[str]
) -> None:
    seen = resnet50_naive()
    seen = dataclasses.replace(seen, evidence={**seen.evidence, "loader": {**seen.evidence["loader"], **loader}})
    finding = Finding(bottleneck="data_wait", share_pct=60.0, why="-", patch={"rungs": {patched: {"enabled": True}}})
    next_steps, later = list_next_steps((finding,), seen, CARDS)
    feeds = [rung for rung in next_steps if CARDS[rung].family == "feed"]
    assert feeds == [rung for rung in then if available(seen, (), rung)] and bool(feeds) == bool(then)
    assert later, "the device's own rungs are still to come"
