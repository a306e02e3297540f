"""The overlap rung. Two ranks run all cases in one program (overlap_ranks.py); the tests read what they left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fastloop.config.loading import load_callback_config
from fastloop.errors import ConfigError, NotApplicable
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.rungs.overlap import Overlap
from tests import models
from tests.bridge.launch import python
from tests.rungs.fits import fit, seeded, verdict

DDP: dict[str, Any] = {"is_ddp": True, "world_size": 2, "strategy": "DDPStrategy"}
SEVERAL = (
    "static_graph with several backward passes per step fails inside DDP;"
    " turn off static_graph, or accumulation and micro-batches"
)
DETACHES = (
    "Net.step calls detach_() on gradients, which bucket views forbid; set gradients to None, or"
    " gradient_as_bucket_view: false"
)
USES = (
    "your code uses gradients (Net.step), and bucket views would overwrite any that it keeps; for the rung's other"
    " settings, set gradient_as_bucket_view: false"
)

SETTINGS = [((), "before_wrap"), ((), "wrapped")]
"""Keys and moments of the actions that set DDP's keywords and read them back."""


class Ranks:
    """What the two ranks left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = [json.loads((folder / f"notes-{rank}.json").read_text()) for rank in (0, 1)]

    def __getitem__(self, case: str) -> dict[str, Any]:
        return self.notes[0][case]  # type: ignore[no-any-return]

    def weights(self, case: str, rank: int = 0) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / f"{case}-{rank}.pt", weights_only=True)  # type: ignore[no-any-return]

    def distance(self, a: str, b: str) -> float:
        return models.distance(self.weights(a), self.weights(b))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    python(Path(__file__).with_name("overlap_ranks.py"), cwd=folder, limit_s=250)
    return Ranks(folder)


@pytest.mark.parametrize(
    ("settings", "facts", "wants"),
    [
        ({}, {}, {"ddp.gradient_as_bucket_view": True}),
        (
            {"bucket_cap_mb": 50, "static_graph": True},
            {},
            {"ddp.gradient_as_bucket_view": True, "ddp.bucket_cap_mb": 50, "ddp.static_graph": True},
        ),
        ({"gradient_as_bucket_view": False}, {"detaches_grads": ("Net.step",)}, {"ddp.gradient_as_bucket_view": False}),
        (
            {},
            {"is_ddp": False, "strategy": "SingleDeviceStrategy"},
            "needs DDP with several devices; the strategy is SingleDeviceStrategy",
        ),
        ({}, {"world_size": 1}, "one process has no gradients to exchange"),
        ({"static_graph": True}, {"accumulate": 2}, SEVERAL),
        ({"static_graph": True}, {"micro_batches": True}, SEVERAL),
        ({"static_graph": True}, {"accumulation_scheduled": True}, SEVERAL),
        ({}, {"detaches_grads": ("Net.step",)}, DETACHES),
        ({}, {"uses_grads": ("Net.step",)}, USES),
        ({"gradient_as_bucket_view": False}, {"uses_grads": ("Net.step",)}, {"ddp.gradient_as_bucket_view": False}),
        (
            {"comm_hook": "bf16"},
            {"user_comm_hook": True},
            "the strategy already has your own ddp_comm_hook, which stays",
        ),
    ],
)
def test_plan(settings: dict[str, Any], facts: dict[str, Any], wants: dict[str, Any] | str) -> None:
    rung = Overlap(enabled=True, **settings)
    if isinstance(wants, str):
        with pytest.raises(NotApplicable) as reason:
            rung.plan(Facts(**{**DDP, **facts}))
        assert str(reason.value) == wants
        return
    change = rung.plan(Facts(**{**DDP, **facts}))
    assert dict(change.wants) == wants and change.parity == "exact"
    assert [(action.keys, action.when) for action in change.actions] == SETTINGS


@pytest.mark.parametrize(
    ("hook", "parity"),
    [
        ("bf16", "approximate"),
        ("fp16", "approximate"),
        ("powersgd", "changes-training"),
    ],
)
def test_plan_of_a_hook(hook: Any, parity: str) -> None:
    change = Overlap(enabled=True, comm_hook=hook).plan(Facts(**DDP))
    assert change.parity == parity
    assert [(action.keys, action.when) for action in change.actions] == [*SETTINGS, (("ddp.comm_hook",), "wrapped")]


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match=r"rungs\.overlap\.bucket_cap_mb"):
        load_callback_config({"rungs": {"overlap": {"enabled": True, "bucket_cap_mb": 0}}})
    with pytest.raises(ConfigError, match="it must be one of none, bf16, fp16, powersgd"):
        load_callback_config({"rungs": {"overlap": {"enabled": True, "comm_hook": "int8"}}})


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("plain", {"bucket_cap_mb": 25.0, "gradient_as_bucket_view": False, "static_graph": False}),
        ("view", {"bucket_cap_mb": 25.0, "gradient_as_bucket_view": True, "static_graph": False}),
        ("buckets", {"bucket_cap_mb": 1.0, "gradient_as_bucket_view": True, "static_graph": False}),
        ("named", {"bucket_cap_mb": 1.0, "gradient_as_bucket_view": True, "static_graph": False}),
        ("named_alone", {"bucket_cap_mb": 25.0, "gradient_as_bucket_view": False, "static_graph": False}),
        ("static", {"bucket_cap_mb": 1.0, "gradient_as_bucket_view": True, "static_graph": True}),
        ("static_named", {"bucket_cap_mb": 25.0, "gradient_as_bucket_view": True, "static_graph": True}),
        ("users_buckets", {"bucket_cap_mb": 3.0, "gradient_as_bucket_view": True, "static_graph": True}),
    ],
)
def test_takes(ranks: Ranks, case: str, settings: dict[str, Any]) -> None:
    for notes in ranks.notes:
        assert notes[case]["settings"] == settings and notes[case]["error"] is None
        if "verdicts" in notes[case]:
            took, why = notes[case]["verdicts"]["overlap"]
            assert took is True and why.startswith("DDP ran with gradient_as_bucket_view True")


@pytest.mark.multirank
def test_does_not_take_what_is_refused(ranks: Ranks) -> None:
    for case in ("static_accumulating", "static_split"):  # pytorch #143580
        assert ranks[case]["verdicts"]["overlap"] == [False, SEVERAL]
        assert ranks[case]["settings"]["static_graph"] is False and ranks[case]["error"] is None
    took, why = ranks["detaching"]["verdicts"]["overlap"]  # R2
    assert took is False and why == DETACHES.replace("Net.step", "Detaching.on_before_zero_grad")
    assert ranks["detaching"]["settings"]["gradient_as_bucket_view"] is False and ranks["detaching"]["error"] is None
    assert ranks["users_hook"]["verdicts"]["overlap"] == [
        False,
        "the strategy already has your own ddp_comm_hook, which stays",
    ]


def test_verify_reads_the_living_object() -> None:
    seen = {"gradient_as_bucket_view": True, "static_graph": False, "bucket_cap_mb": 25}

    def took(rung: Overlap, **more: Any) -> bool | None:
        return rung.verify(Measurement(evidence={"overlap": {**seen, **more}})).took

    assert Overlap().verify(Measurement()).took is None
    assert took(Overlap()) is True and took(Overlap(), gradient_as_bucket_view=False) is False
    assert took(Overlap(bucket_cap_mb=50)) is False and took(Overlap(bucket_cap_mb=25)) is True
    assert took(Overlap(static_graph=True)) is False
    assert took(Overlap(comm_hook="bf16")) is False and took(Overlap(comm_hook="bf16"), hook_calls=3) is True


def test_one_device_is_skipped() -> None:
    watcher, _ = fit({"overlap": {}}, seeded())
    reason = "needs DDP with several devices; the strategy is SingleDeviceStrategy"
    assert (verdict(watcher, "overlap").took, verdict(watcher, "overlap").why) == (False, reason)


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        "view",
        "no_view",
        "buckets",
        "named",
        "named_alone",
        "static",
        "static_named",
        "users_buckets",
        "detaching",
        "users_hook",
        "refused_hook",
        "powersgd_wide",
        "after_errors",
    ],
)
def test_parity(ranks: Ranks, case: str) -> None:
    """Views, buckets and static graphs are exact: two ranks' sum has one order, whatever the buckets."""
    assert ranks[case]["steps"] == ranks["plain"]["steps"] == 16
    assert ranks.distance("plain", case) == 0
    assert ranks.distance("other_rate", case) > 0


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("case", "plain", "tolerance"),
    [
        ("fp16", "plain", 5e-3),
        ("bf16", "plain", 1e-2),
        ("powersgd", "plain_small", 0.3),
        ("static_split", "plain", 1e-5),
        ("static_accumulating", "plain_accumulating", 0),
        ("hook_accumulating", "plain_accumulating", 5e-3),
    ],
)
def test_parity_within_a_tolerance(ranks: Ranks, case: str, plain: str, tolerance: float) -> None:
    if ranks[case]["error"] or ranks[case]["verdicts"]["overlap"][1].startswith("the bf16 hook cannot be"):
        pytest.skip("this build of torch has no bf16 hook on the CPU")
    assert ranks.distance(plain, case) <= tolerance
    if plain != "plain_small":
        assert ranks.distance({"plain": "plain_accumulating"}.get(plain, "plain"), case) > tolerance
    if tolerance:
        assert ranks.distance(plain, case) > 0  # something was rounded


@pytest.mark.multirank
def test_ranks_agree(ranks: Ranks) -> None:
    for case, notes in ranks.notes[0].items():
        if notes["error"] is None:
            assert models.distance(ranks.weights(case, 0), ranks.weights(case, 1)) == 0, case
            assert notes["steps"] == ranks.notes[1][case]["steps"]


@pytest.mark.multirank
def test_hooks_run_on_synchronized_steps_only(ranks: Ranks) -> None:  # R4
    for notes in ranks.notes:
        whole, accumulating = notes["fp16"]["calls"], notes["hook_accumulating"]["calls"]
        buckets = whole[-1]
        assert buckets > 1 and all(calls > 0 for calls in whole)
        assert accumulating[2::2] == 7 * [0] and accumulating[3::2] == 7 * [buckets]
        assert notes["fp16"]["evidence"]["hook_calls"] == sum(whole)
        assert notes["hook_accumulating"]["verdicts"]["overlap"][0] is True


@pytest.mark.multirank
def test_a_hook_that_cannot_be_registered_is_skipped(ranks: Ranks) -> None:  # R3
    took, why = ranks["refused_hook"]["verdicts"]["overlap"]
    assert took is False and ranks["refused_hook"]["error"] is None
    assert why == (
        "the bf16 hook cannot be registered: BF16 all reduce communication hook required CUDA 11+ and NCCL"
        " 2.10+. (the bucket settings are in place)"
    )


@pytest.mark.multirank
def test_powersgd_over_gloo_with_several_buckets_is_refused(ranks: Ranks) -> None:
    took, why = ranks["powersgd_wide"]["verdicts"]["overlap"]
    assert took is False and ranks["powersgd_wide"]["error"] is None
    assert why == ("over gloo, powersgd hangs with more than one bucket; it needs NCCL (bucket settings are in place)")
    assert ranks["powersgd"]["verdicts"]["overlap"][0] is True and set(ranks["powersgd"]["calls"]) == {1}


@pytest.mark.multirank
def test_unused_parameters_are_named_beside_lightnings_text(ranks: Ranks) -> None:  # R1
    for notes in ranks.notes:
        assert "It looks like your LightningModule has parameters that were not used" in notes["unused"]["error"]
    (line,) = [line for line in ranks["unused"]["warnings"] if "gradient" in line]
    assert line.endswith("fastloop: parameters without a gradient: spare.weight, spare.bias")


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("case", "method"),
    [("keeping", "Keeping.on_before_optimizer_step"), ("moving", "Moving.on_before_optimizer_step")],
)
def test_gradients_that_the_module_keeps_or_moves_stay_what_they_were(ranks: Ranks, case: str, method: str) -> None:
    took, why = ranks[case]["verdicts"]["overlap"]
    assert took is False and why == USES.replace("Net.step", method)
    assert ranks.distance(f"{case}_plain", case) == 0.0
    assert ranks.distance(f"{case}_plain", f"{case}_views") > 1e-6  # bucket views would have changed them


@pytest.mark.multirank
def test_gradients_detached_out_of_sight_get_a_hint(ranks: Ranks) -> None:  # R2
    assert "Can't detach views in-place" in ranks["detached_unseen"]["error"]
    (line,) = [line for line in ranks["detached_unseen"]["warnings"] if "detached" in line]
    assert line.endswith("rungs.overlap.gradient_as_bucket_view forbids: set it to false")


@pytest.mark.multirank
def test_beside_the_other_rungs(ranks: Ranks) -> None:
    for notes in ranks.notes:
        assert notes["everything"]["error"] is None
        took = {rung: took for rung, (took, _) in notes["everything"]["verdicts"].items()}
        assert took == {"amp": True, "layout": False, "fused": True, "compile": True, "overlap": True}
        assert notes["compiled"]["verdicts"]["compile"] == [True, "1 graph captured"]
    assert ranks.distance("plain", "compiled") < 1e-6 < ranks.distance("plain", "everything") < 0.05


@pytest.mark.multirank
def test_undo(ranks: Ranks) -> None:
    for notes in ranks.notes:
        assert all(case["undone"] for case in notes.values())
    assert ranks["unused"]["error"] and ranks["detached_unseen"]["error"]  # fits that raised are among them
    assert ranks["twice"]["verdicts"]["overlap"][0] is True and ranks["twice"]["steps"] == 32
    assert ranks["twice"]["settings"]["bucket_cap_mb"] == 1.0
    assert ranks["after_errors"]["verdicts"]["overlap"][0] is True
