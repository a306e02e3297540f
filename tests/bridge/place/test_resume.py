"""Runs that were cut off and resumed: every sample of the epoch once, in the order it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import models
from tests.bridge.place.resumed import BATCH, SAMPLES, fit, place, shuffled
from tests.runs import feed_on_cpu, watching

pytestmark = pytest.mark.usefixtures("on_cpu")
ENGINES: dict[str, dict[str, Any]] = {
    "clone": {"prefetch": {"depth": 2}},
    "workers": {"workers": {"count": 2, "persistent": False}},
    "kept workers": {"workers": {"count": 2, "persistent": True}, "prefetch": {"depth": 3}},
    "threads": {"nodes": {"threads": 2}},
    "rows": {"cache": {}},
}
OTHERS: list[dict[str, Any]] = [
    {"prefetch": {"depth": 5}},
    {"workers": {"count": 1, "persistent": True}},
    {"workers": {"count": 2, "prefetch_factor": 4, "persistent": False}, "prefetch": {"depth": 1}},
    {"nodes": {"threads": 3}, "prefetch": {"depth": 2}},
    {"cache": {"store": "device"}},
]
MERGED = {"batch": {"micro_batch": 64}}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)


@pytest.mark.parametrize(("accumulate", "merges"), [(1, False), (3, False), (3, True)], ids=["1", "3", "merged"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_killed_at_any_step_goes_on(tmp_path: Path, engine: str, accumulate: int, merges: bool) -> None:
    """Another seed, other workers, another depth, and windows merged or not: the same samples in the same order.

    At every second of the steps below; what one way to accumulate leaves out, another has.
    """
    first = (list(ENGINES).index(engine) + accumulate // 3 + merges) % 2
    rungs = {**ENGINES[engine], **(MERGED if merges else {})}
    settings = {"accumulate_grad_batches": accumulate}
    loop = watching(rungs)
    whole, _ = fit(None, shuffled(), seed=5, save=tmp_path, loop=loop, **settings)
    assert {step.rung: step.status for step in loop.plan.steps} == dict.fromkeys(rungs, "planned")
    # A window in one training_step, the short batch of the last one apart; or each batch.
    assert len(whole.trained) == 2 * (4 if merges else 8)
    assert all(sorted(whole.drawn(epoch)) == list(range(SAMPLES)) for epoch in (0, 1))
    steps = -(-8 // accumulate)
    for number, step in list(enumerate((1, 2, steps, steps + 1, 2 * steps - 1)))[first::2]:
        epoch, done = divmod(step, steps)
        then = {**OTHERS[number % len(OTHERS)], **(MERGED if accumulate > 1 and merges != (number % 2 == 0) else {})}
        loop = watching(then)
        saved = tmp_path / f"step={step}.ckpt"
        resumed, _ = fit(None, shuffled(), seed=100 + number, ckpt=saved, loop=loop, **settings)
        behind = min(done * accumulate * BATCH, SAMPLES)
        if done:
            assert resumed.drawn(epoch) == whole.drawn(epoch)[behind:], (step, then)
            assert models.distance(whole.ends[epoch], resumed.ends[0]) < (1e-6 if accumulate > 1 else 1e-9)
        else:
            assert sorted(resumed.drawn(epoch)) == list(range(SAMPLES)) and not resumed.drawn(epoch - 1)
        if not merges and "batch" not in then and done:
            assert [each for each in resumed.trained if each[0] == epoch] == [
                each for each in whole.trained if each[0] == epoch
            ][done * accumulate :]
        assert all(sorted(resumed.drawn(later)) == list(range(SAMPLES)) for later in range(epoch + 1, 2))
        assert {each.rung: each.status for each in loop.plan.steps} == dict.fromkeys(then, "planned")
        assert place(saved)["batches"] == done * accumulate


def test_counted_by_what_was_handed_out_samples_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with the look-ahead of workers and feed in the count, the test above would fail."""
    from fastloop.bridge.place.keeping import PlaceKeeper

    def read(keeper: Any, count_batches: Any) -> Any:
        if keeper._kept is None or keeper._kept.order is None:
            return None
        drawn = len(keeper._kept._digests) - 1
        return {"over": False, "batches": drawn, "digest": keeper._kept.digest(drawn), "order": keeper._kept.order}

    monkeypatch.setattr(PlaceKeeper, "read", read)
    whole, _ = fit(ENGINES["kept workers"], shuffled(), seed=5, save=tmp_path)
    assert place(tmp_path / "step=1.ckpt")["batches"] > 1
    resumed, _ = fit(OTHERS[0], shuffled(), seed=6, ckpt=tmp_path / "step=1.ckpt", max_epochs=1)
    assert set(resumed.drawn(0)) < set(whole.drawn(0)[BATCH:])


def test_without_the_place_samples_come_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of a plain run: the epoch starts as Lightning starts it, and a line says so."""
    whole, _ = fit(None, shuffled(), seed=5, save=tmp_path)
    assert place(tmp_path / "step=3.ckpt") is None
    with pytest.warns(UserWarning, match="written after 3 training batches of its epoch, but does not record where"):
        resumed, _ = fit(ENGINES["clone"], shuffled(), seed=6, ckpt=tmp_path / "step=3.ckpt", max_epochs=1)
    plain, _ = fit(None, shuffled(), seed=6, ckpt=tmp_path / "step=3.ckpt", max_epochs=1)
    assert resumed.trained == plain.trained and len(plain.trained) == 5
    assert set(whole.drawn(0)[: 3 * BATCH]) & set(resumed.drawn(0))


def test_a_checkpoint_serves_a_run_without_us(tmp_path: Path) -> None:
    """It loads as weights only, and Lightning alone resumes it."""
    fit(ENGINES["workers"], shuffled(), seed=5, save=tmp_path)
    ours, plain = tmp_path / "step=3.ckpt", tmp_path / "plain"
    fit(None, shuffled(), seed=5, save=plain)
    resumed, trainer = fit(None, shuffled(), seed=6, ckpt=ours, max_epochs=1)
    reference, _ = fit(None, shuffled(), seed=6, ckpt=plain / "step=3.ckpt", max_epochs=1)
    assert resumed.trained == reference.trained and trainer.global_step == 8


@pytest.mark.parametrize("rungs", [None, {}, {"fused": {}}, {"batch": {"micro_batch": 4}}])
def test_nothing_is_saved_where_no_rung_changes_the_loader(tmp_path: Path, rungs: Any) -> None:
    fit(rungs, shuffled(), seed=5, save=tmp_path, max_epochs=1)
    assert "FastLoop" not in torch.load(tmp_path / "step=2.ckpt", weights_only=True)["callbacks"]
