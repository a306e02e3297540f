"""What a ledger writes down, and that nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from fastloop.bridge.trials import ceilings
from fastloop.bridge.trials.sample_ledger import MOST_STEPS, Ledger
from tests import models, runs
from tests.bridge.launch import python
from tests.rungs.fits import Raises
from tests.twins import Twin, ledger, made, shuffled


def test_a_row_for_each_optimizer_step(tmp_path: Path) -> None:
    found, _ = ledger(tmp_path, max_epochs=2, train=lambda: shuffled(84))
    assert (found["schema"], found["rank"], found["ids"], found["why"]) == (1, 0, "sampler", None)
    assert [row[1:3] for row in found["steps"]] == [[32, 4], [32, 4], [20, 3]] * 2, "11 batches an epoch"
    assert [row[3] for row in found["steps"]] == [[pytest.approx(0.01 * 0.9**done)] for done in range(6)]
    assert len({row[0] for row in found["steps"]}) == 6 == found["optimizer_steps"]
    assert found["planned"] == [4, 4, 3] * 2 and not found["partial"]


@pytest.mark.parametrize(
    "settings",
    [
        {"rungs": {"batch": {"micro_batch": 32}}},
        {"rungs": {"batch": {"micro_batch": 3}}},
        {"rungs": {"workers": {"count": 2}}},
        {"rungs": {"workers": {"count": 1}, "batch": {"micro_batch": 64}}},
        {"train": lambda: shuffled(num_workers=2)},
        {"train": lambda: shuffled(84, num_workers=1, persistent_workers=True), "samples": 84},
        {"rungs": {"batch": {"micro_batch": 32}}, "samples": 84, "train": lambda: shuffled(84)},
    ],
    ids=["merged", "split", "workers", "both", "own workers", "persistent", "merged, short last window"],
)
def test_the_same_samples_have_the_same_hashes(settings: dict[str, Any], tmp_path: Path) -> None:
    samples = settings.pop("samples", 96)
    base, _ = ledger(tmp_path / "base", max_epochs=2, train=lambda: shuffled(samples))
    arm, _ = ledger(tmp_path / "arm", max_epochs=2, **settings)
    assert [row[:2] + row[3:] for row in arm["steps"]] == [row[:2] + row[3:] for row in base["steps"]]
    assert [row[2] for row in arm["steps"]] == arm["planned"]
    other, _ = ledger(tmp_path / "other", max_epochs=2, train=lambda: shuffled(samples, seed=9))
    assert all(a[0] != b[0] for a, b in zip(base["steps"], other["steps"], strict=True))


def test_an_order_that_workers_change_is_seen(tmp_path: Path) -> None:
    """A RandomSampler with a generator draws once more at an epoch's end, which a loader without workers never asks
    for: torch/utils/data/sampler.py, `num_samples % n`. Its second epoch is another one."""

    class Notes(Twin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen = [*getattr(self, "seen", []), batch[1].sum().item()]
            return super().training_step(batch, batch_idx)

    def train(workers: int) -> Any:
        return DataLoader(
            models.pairs(96),
            batch_size=8,
            shuffle=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(0),
        )

    (base, plain), (arm, module) = (
        ledger(tmp_path / str(count), Notes, lambda: train(count), max_epochs=2)  # noqa: B023
        for count in (0, 1)
    )
    same = [a[0] == b[0] for a, b in zip(base["steps"], arm["steps"], strict=True)]
    assert same == [True] * 3 + [False] * 3
    assert plain.seen[:12] == module.seen[:12] and plain.seen[12:] != module.seen[12:], "as it was"


def test_a_feed_that_looks_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.feed_on_cpu(monkeypatch)
    base, _ = ledger(tmp_path / "base", max_epochs=2)
    assert ledger(tmp_path / "arm", rungs={"prefetch": {"depth": 3}}, max_epochs=2)[0] == base


def test_the_training_is_the_one_without_it(tmp_path: Path) -> None:
    def fitted(with_ledger: bool) -> tuple[list[float], Any, Any]:
        module, trainer = made(Twin, None, max_epochs=2)
        if with_ledger:
            Ledger.into(trainer, tmp_path)
        torch.manual_seed(1)
        given = DataLoader(models.pairs(), batch_size=8, shuffle=True)
        trainer.fit(module, given)
        return module.losses, models.weights(module), torch.get_rng_state()

    (losses, weights, state), (plain, own, before) = fitted(True), fitted(False)
    assert losses == plain and torch.equal(state, before)
    assert all(torch.equal(weights[name], own[name]) for name in own)


# -- backwards --------------------------------------------------------------------------------------------------------


class Frozen(Twin):
    """Most of it is frozen or takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(4, 4)
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)
        self.tail = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(100))


class SkipsABatch(Twin):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 5 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("kind", "counts"), [(Frozen, [4, 4, 4]), (SkipsABatch, [4, 3, 4])])
def test_backwards_that_were_done(kind: Any, counts: list[int], tmp_path: Path) -> None:
    found, module = ledger(tmp_path, kind)
    assert [row[2] for row in found["steps"]] == counts
    assert not any(getattr(each, "_post_accumulate_grad_hooks", None) for each in module.parameters()), "it let go"


class Pairwise(Twin):
    """Compares the samples of a batch, so that its windows are not merged."""

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(out @ y.T, torch.arange(len(y)))


def test_windows_that_run_apart_were_planned_so(tmp_path: Path) -> None:
    rungs = {"batch": {"micro_batch": 32}}
    found, _ = ledger(tmp_path / "apart", Pairwise, rungs=rungs, train=lambda: shuffled(84))
    assert [row[1:3] for row in found["steps"]] == [[32, 4], [32, 4], [20, 3]] and found["planned"] == [4, 4, 3]
    merged, _ = ledger(tmp_path / "merged", Twin, rungs=rungs, train=lambda: shuffled(84))
    assert merged["planned"] == [row[2] for row in merged["steps"]] == [1, 1, 2]


def test_compiled_parts_are_counted(tmp_path: Path) -> None:
    class Compiled(Twin):
        def __init__(self) -> None:
            super().__init__()
            self.second = torch.compile(self.second, backend="aot_eager")  # type: ignore[assignment]

    assert [row[2] for row in ledger(tmp_path, Compiled)[0]["steps"]] == [4, 4, 4]


class ByHand(Twin):
    """Two optimizers, manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.first.parameters(), 0.1), torch.optim.SGD(self.last.parameters(), 0.2)]


def test_manual_optimization(tmp_path: Path) -> None:
    found, _ = ledger(tmp_path, ByHand, accumulate_grad_batches=1)
    assert [row[1:] for row in found["steps"]] == [[8, 2, [0.1, 0.2]]] * 12


def test_a_rate_that_is_a_tensor(tmp_path: Path) -> None:
    class Tensor(Twin):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=torch.tensor(0.25))

    assert [row[3] for row in ledger(tmp_path, Tensor)[0]["steps"]] == [[0.25]] * 3


# -- samples that are known otherwise, or not at all ------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from models.pairs(96)


def test_a_stream_is_known_by_its_content(tmp_path: Path) -> None:
    def fitted(workers: int) -> Any:
        train = DataLoader(Stream(), batch_size=8, num_workers=workers)
        return ledger(tmp_path / str(workers), train=lambda: train)[0]

    first, second = fitted(0), fitted(1)
    assert first["ids"] == "content" and first["steps"] == second["steps"] and first["steps"][0][1:3] == [32, 4]
    assert first["epochs"] == [[3, 96, True, None, None]] and first["own_order"] is None


def test_several_loaders(tmp_path: Path) -> None:
    class Two(Twin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)

    def fitted(seed: int) -> Any:
        return ledger(tmp_path / str(seed), Two, lambda: {"a": shuffled(), "b": shuffled(40, seed=seed)})[0]

    first, again, other = fitted(3), fitted(3), fitted(4)
    assert first["ids"] == "sampler" and first == again
    assert all(a[0] != b[0] for a, b in zip(first["steps"], other["steps"], strict=True)) and len(first["steps"]) == 3
    assert first["epochs"][0][2:] == [False, first["epochs"][0][3], None] and first["epochs"][0][3] is not None


def test_replayed_batches_and_a_step_that_takes_its_own(tmp_path: Path) -> None:
    module, trainer = made(Twin, None)
    ceilings.remove_cost(trainer, "replayed")
    Ledger.into(trainer, tmp_path)
    trainer.fit(module, shuffled())
    found = json.loads((tmp_path / "ledger.json").read_text())
    assert found["ids"] == "content" and found["steps"][0][1:3] == [32, 4]

    class Iterates(Twin):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, *_ = next(dataloader_iter)
            return super().training_step(batch, 0)

    found, _ = ledger(tmp_path, Iterates, accumulate_grad_batches=1)
    assert found["ids"] is None and "fetches its own batches" in found["why"] and found["steps"][0][0] is None
    assert found["steps"][0][2] == 1


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_training_that_raises_leaves_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "ledger-3.json").write_text("of another trial")
    module, trainer = made(Twin, None, accumulate_grad_batches=1)
    Ledger.into(trainer, tmp_path)
    trainer.callbacks.append(Raises())
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(module, shuffled())
    found = json.loads((tmp_path / "ledger.json").read_text())
    assert found["partial"] and len(found["steps"]) == 2 and found["epochs"][0][:3] == [2, 16, False]
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.json"]
    assert not any(getattr(each, "_post_accumulate_grad_hooks", None) for each in module.parameters())


def test_a_second_fit_begins_anew_and_a_validation_leaves_it(tmp_path: Path) -> None:
    module, trainer = made(models.Regression, None)
    Ledger.into(trainer, tmp_path)
    trainer.fit(module, shuffled())
    trainer.validate(module, models.loader(), verbose=False)
    with pytest.raises(ValueError, match="ckpt_path"):
        trainer.test(module, models.loader(), ckpt_path="best")  # as scripts do; a trial has written no checkpoint
    found = json.loads((tmp_path / "ledger.json").read_text())
    assert len(found["steps"]) == 3 and not found["partial"], "an error after the fit is none of the fit"
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, shuffled(64))
    found = json.loads((tmp_path / "ledger.json").read_text())
    assert [row[1] for row in found["steps"]] == [32] * 4 and found["ids"] == "sampler"
    assert [row[:3] for row in found["epochs"]] == [[2, 64, True], [4, 64, True]]


def test_into_from_a_callbacks_setup(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    class Injects(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            Ledger.into(trainer, tmp_path)

    trainer = models.trainer(callbacks=[Injects()])
    trainer.fit(models.Regression(), shuffled())
    assert len(json.loads((tmp_path / "ledger.json").read_text())["steps"]) == 12


def test_it_stops_at_ten_thousand_steps_and_on_a_full_disk(tmp_path: Path) -> None:
    kept = Ledger(tmp_path)
    for _ in range(MOST_STEPS + 3):
        kept._close()
    assert len(kept._steps) == MOST_STEPS and kept._count == MOST_STEPS + 3
    module, trainer = made(Twin, None)
    (tmp_path / "file").write_text("")
    Ledger.into(trainer, tmp_path / "file" / "below")  # nothing can be written there
    trainer.fit(module, shuffled())
    assert trainer.global_step == 3


def test_a_fault_of_its_own_costs_only_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "_plan_pieces", lambda *_: 1 / 0)
    found, module = ledger(tmp_path)
    assert len(module.losses) == 12 and found["ids"] is None and "ZeroDivisionError" in found["why"]


@pytest.mark.multirank
@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path) -> None:
    python(Path(__file__).with_name("parity_ranks.py"), cwd=tmp_path, limit_s=250)
    ledgers = {
        name: [json.loads((tmp_path / name / f"ledger{rank}.json").read_text()) for rank in ("", "-1")]
        for name in ("base", "arm")
    }
    assert [each["rank"] for each in ledgers["base"]] == [0, 1]
    hashes = [[[row[0] for row in each["steps"]] for each in ledgers[name]] for name in ("base", "arm")]
    assert hashes[0] == hashes[1] and hashes[0][0] != hashes[0][1] and len(hashes[0][0]) == 3
    assert [row[2] for row in ledgers["base"][0]["steps"]] == [4, 4, 4]
    assert [row[2] for row in ledgers["arm"][1]["steps"]] == [2, 2, 2] == ledgers["arm"][1]["planned"]
    answers = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*-answer.json")}
    assert answers["base-answer"]["self_deviation"] == 0 and answers["base-answer"]["why"] is None
    assert 0 < answers["arm-answer"]["deviation"] < 1e-6 and answers["arm-answer"]["finite"]
    assert answers["wrong-answer"]["deviation"] > 0.1, "a rank that keeps its gradient to itself"
