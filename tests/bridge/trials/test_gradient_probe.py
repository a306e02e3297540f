"""The gradient of one step: what is compared with what, and what is said where nothing can be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from fastloop.bridge.fit import recipe_modules
from fastloop.bridge.trials import ceilings, gradient_probe, gradient_state
from fastloop.bridge.trials.gradient_probe import GradientProbe, measure
from fastloop.experiments.trials.trial import Job, run_trial
from fastloop.feeds.images.byte_batches import AsBytes
from fastloop.judge.parity import judge_gradient
from fastloop.records import store
from fastloop.records.experiment import Gate
from fastloop.records.facts import Facts
from fastloop.records.plan import Change
from fastloop.records.trial import GradientAnswer
from fastloop.rungs.prefetch import Prefetch
from tests import models
from tests.pictures import MEAN, STD, Classifier, draw_folder
from tests.trainings import NET
from tests.twins import Twin, gradient, made, shuffled


def judge(*answers: Any) -> Gate:
    """The gradient gate between two answers, which may be as they read in answer.json."""
    base, arm = (store.decode(answer, GradientAnswer) for answer in answers)
    assert base is not None and arm is not None
    return judge_gradient(base, arm, "approximate")


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    return gradient(tmp_path / "base")[0]


def arm(tmp_path: Path, name: str = "arm", **changes: Any) -> dict[str, Any]:
    return gradient(tmp_path / name, tmp_path / "base", **changes)[0]


def test_what_the_base_says_and_keeps(base: dict[str, Any], tmp_path: Path) -> None:
    elements = 8 * 32 + 32 + 32 * 16 + 16 + 16 + 1
    assert (base["precision"], base["batches"], base["why"], base["finite"]) == ("fp32", 4, None, True)
    assert base["self_deviation"] == base["random_deviation"] == 0 and base["rounds"] == 6
    assert 1e-7 < base["rounding"]["fp32"] < 1e-5 < base["rounding"]["tf32"] < base["rounding"]["bf16"] < 0.1
    kept = gradient_state.read(tmp_path / "base", 0)
    assert len(kept["gradient"]) == 6 and sum(each.numel() for each in kept["gradient"].values()) == elements
    assert [[len(leaf) for leaf in leaves] for leaves in kept["batches"][0]] == [[8, 8]] * 4


def test_the_gradient_is_that_of_the_whole_step(base: dict[str, Any], tmp_path: Path) -> None:
    """Computed by hand: the mean over the step's samples, dropout off, at the initial weights."""
    kept, module = gradient_state.read(tmp_path / "base", 0), Twin()
    module.load_state_dict(kept["weights"])
    module.eval()
    x, y = (torch.cat([leaves[n] for leaves in kept["batches"][0]]) for n in (0, 1))
    loss = module.training_step((x, y), 0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(base["loss"], rel=1e-6) and len(x) == 32
    for name, parameter in module.named_parameters():
        assert torch.allclose(parameter.grad, kept["gradient"][name], rtol=1e-4, atol=1e-7), name  # type: ignore[arg-type]


def test_another_seed_starts_from_the_same_weights_and_samples(base: dict[str, Any], tmp_path: Path) -> None:
    class Elsewhere(Twin):
        def __init__(self) -> None:
            torch.manual_seed(99)
            super().__init__()

    found = arm(tmp_path, kind=Elsewhere, train=lambda: shuffled(seed=8))
    assert found["deviation"] == 0 and found["loss"] == base["loss"]
    assert found["weights_missing"] == found["weights_extra"] == []


@pytest.mark.parametrize(("batch_size", "window"), [(32, 1), (16, 2), (4, 8), (8, 4)], ids=lambda value: str(value))
def test_the_loader_may_cut_otherwise(batch_size: int, window: int, base: dict[str, Any], tmp_path: Path) -> None:
    found = arm(tmp_path, train=lambda: shuffled(batch_size=batch_size), accumulate_grad_batches=window)
    assert found["deviation"] < 1e-6 and found["batches"] == window and found["why"] is None


class Deep(Twin):
    def __init__(self) -> None:
        super().__init__()
        self.second, self.last = torch.nn.Linear(32, 32), torch.nn.Linear(32, 1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train": lambda: shuffled(batch_size=12)}, "32 samples do not fill whole batches of 12/12/12/12"),
        (
            {"train": lambda: DataLoader([(torch.ones(8), torch.ones(1), torch.ones(2))] * 96, batch_size=8)},
            "the same number of tensors",
        ),
        ({"kind": Deep}, "the base's second.weight has a different shape"),
    ],
    ids=["another global batch", "other batches", "another model"],
)
def test_what_cannot_be_compared_is_said(settings: Any, says: str, base: dict[str, Any], tmp_path: Path) -> None:
    found = arm(tmp_path, **settings)
    assert says in found["why"] and "deviation" not in found
    gate = judge(base, found)
    assert gate.passed is None and gate.detail["testable"] is False


def test_without_a_base_there_is_a_reason(tmp_path: Path) -> None:
    found, _ = gradient(tmp_path / "arm", tmp_path / "nowhere")
    assert "cannot be read: FileNotFoundError" in found["why"] and "deviation" not in found


def test_a_base_with_other_ranks(base: dict[str, Any], tmp_path: Path) -> None:
    kept = gradient_state.read(tmp_path / "base", 0)
    gradient_state.save(tmp_path / "base", 0, {**kept, "world_size": 2})
    assert arm(tmp_path)["why"] == "the base has 2 ranks, but this arm has 1"


def test_new_parameters_are_named(base: dict[str, Any], tmp_path: Path) -> None:
    class Wider(Twin):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.nn.Parameter(torch.ones(()))

        def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(out + self.shift, y)

    found = arm(tmp_path, kind=Wider)
    assert found["weights_extra"] == ["shift"] and found["deviation"] > 0.1


def test_a_compiled_arm_has_the_same_names(base: dict[str, Any], tmp_path: Path) -> None:
    class Compiled(Twin):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.compile(self.first, backend="aot_eager")  # type: ignore[assignment]

    found = arm(tmp_path, kind=Compiled)
    assert found["weights_missing"] == [] and found["deviation"] < 1e-6


# -- trainings of other kinds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"limit_train_batches": 3}, {"max_steps": 1}, {"samples": 24}],
    ids=["limited", "one step", "an epoch shorter than a window"],
)
def test_short_epochs(settings: dict[str, Any], tmp_path: Path) -> None:
    samples = settings.pop("samples", 96)
    first, _ = gradient(tmp_path / "base", train=lambda: shuffled(samples), **settings)
    batches = 4 if "max_steps" in settings else 3
    assert first["batches"] == batches and first["self_deviation"] == 0
    assert first["rounds"] == 6
    assert arm(tmp_path, train=lambda: shuffled(samples), **settings)["deviation"] == 0


def test_a_step_that_changes_its_batch_in_place(tmp_path: Path) -> None:
    class Normalises(Twin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch[0].mul_(0.5)
            return super().training_step(batch, batch_idx)

    first, _ = gradient(tmp_path / "base", kind=Normalises)
    assert first["self_deviation"] == 0
    assert arm(tmp_path, kind=Normalises)["deviation"] == 0 < arm(tmp_path, "other")["deviation"]


def test_a_step_with_random_numbers_of_its_own(tmp_path: Path) -> None:
    class Noisy(Twin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch[0] + torch.randn_like(batch[0]), batch[1]), batch_idx)

    first, _ = gradient(tmp_path / "base", kind=Noisy)
    assert first["self_deviation"] == 0 and first["random_deviation"] > 0.1
    assert arm(tmp_path, kind=Noisy)["deviation"] == 0, "the same numbers for the same batches"
    gate = judge(first, arm(tmp_path, "cut", kind=Noisy, rungs={"batch": {"micro_batch": 4}}))
    assert gate.passed is not False


class ByHand(Twin):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx) / 4)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        rest = [*self.second.parameters(), *self.last.parameters()]
        return [torch.optim.SGD(self.first.parameters(), 0.0), torch.optim.SGD(rest, 0.0)]


def test_manual_optimization(base: dict[str, Any], tmp_path: Path) -> None:
    found = arm(tmp_path, kind=ByHand, train=lambda: shuffled(batch_size=32), accumulate_grad_batches=1)
    assert found["deviation"] == pytest.approx(0.75, abs=1e-6)
    assert found["kept"] == pytest.approx(0.25, abs=1e-6) and found["loss"] is None


def test_a_loss_scaler_is_taken_out(base: dict[str, Any], tmp_path: Path) -> None:
    found = arm(tmp_path, rungs={"amp": {"mode": "16-mixed"}})
    assert found["precision"] == "fp16" and found["finite"] and 1e-5 < found["deviation"] < 1e-2


def test_what_overflows_at_first_is_tried_with_smaller_scales(tmp_path: Path) -> None:
    class Large(Twin):
        def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(out.half(), y.half()).float() * 64

    gradient(tmp_path / "base", kind=Large)
    found = arm(tmp_path, kind=Large, rungs={"amp": {"mode": "16-mixed"}})
    assert found["finite"] and found["rounds"] == 2 and found["deviation"] < 0.05


def test_clipping_is_looked_at_as_well(tmp_path: Path) -> None:
    class Lost(Twin):
        def configure_gradient_clipping(self, *args: Any, **named: Any) -> None:
            """Clips nothing, whatever the Trainer was told."""

    first, _ = gradient(tmp_path / "base", gradient_clip_val=1e-3)
    assert arm(tmp_path, gradient_clip_val=1e-3)["deviation"] == 0 and first["why"] is None
    lost = arm(tmp_path, "lost", kind=Lost, gradient_clip_val=1e-3)
    assert lost["deviation"] > 1 and lost["clips"] == "in configure_gradient_clipping"
    assert first["clips"] == "by norm to 0.001" and arm(tmp_path, "none")["clips"] is None


def test_numbers_that_are_none(base: dict[str, Any], tmp_path: Path) -> None:
    class Breaks(Twin):
        def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(out, y) * float("inf")

    found = arm(tmp_path, kind=Breaks)
    assert found["finite"] is False and found["deviation"] is None and judge(base, found).passed is False


@pytest.mark.parametrize("sends_bytes", ["base", "arm", "both"])
def test_pictures_that_one_arm_sends_as_bytes(
    sends_bytes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base with workers sends them as bytes, DALI makes floats: the same samples."""
    datasets, v1 = pytest.importorskip("torchvision.datasets"), pytest.importorskip("torchvision.transforms")

    def plan(_rung: Prefetch, facts: Facts) -> Change:  # as on CUDA, without a feed
        if facts.loader is None:
            return Change(waits_for="the train loader", may_want=("dataset.uint8",))
        return Change(wants={"dataset.uint8": AsBytes()})

    monkeypatch.setattr(Prefetch, "plan", plan)
    tail = [v1.RandomCrop(20, padding=4), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    folder = datasets.ImageFolder(draw_folder(tmp_path / "pictures", 40), v1.Compose(tail))

    def load() -> DataLoader[Any]:
        return DataLoader(folder, batch_size=8)

    as_bytes: Any = {"prefetch": {}}
    how: Any = {"kind": Classifier, "train": load}
    base, _ = gradient(tmp_path / "base", rungs=as_bytes if sends_bytes != "arm" else None, **how)
    other, _ = gradient(tmp_path / "arm", tmp_path / "base", rungs=as_bytes if sends_bytes != "base" else None, **how)
    assert judge(base, other).passed is True and other["deviation"] == 0, other
    kept = gradient_state.read(tmp_path / "base", 0)["batches"][0]
    assert all(leaves[0].dtype == torch.float32 for leaves in kept)
    monkeypatch.setattr(ceilings, "_finish", lambda _changed, batch: batch)
    if sends_bytes == "base":  # what went wrong before
        gradient(tmp_path / "bytes", rungs=as_bytes, **how)
        assert gradient_state.read(tmp_path / "bytes", 0)["batches"][0][0][0].dtype == torch.uint8


def test_several_loaders(tmp_path: Path) -> None:
    class Two(Twin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)

    def both(seed: int) -> Any:
        return {"a": shuffled(seed=seed), "b": shuffled(64, batch_size=4, seed=seed)}

    first, _ = gradient(tmp_path / "base", kind=Two, train=lambda: both(1))
    found = arm(tmp_path, kind=Two, train=lambda: both(2))
    assert first["self_deviation"] == 0 == found["deviation"] and found["batches"] == 4


# -- inside somebody's script -----------------------------------------------------------------------------------------


def test_a_script_ends_after_the_step_and_nothing_stays_changed(tmp_path: Path) -> None:
    class Injects(L.Callback):
        probe: GradientProbe

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if not hasattr(self, "probe"):
                self.probe = GradientProbe.into(trainer, tmp_path)

    dropout, mode, injects = functional.dropout, torch.are_deterministic_algorithms_enabled(), Injects()
    module = models.Regression(dropout=0.5)
    trainer = models.trainer(max_epochs=50, min_epochs=50, callbacks=[injects])
    trainer.fit(module, shuffled(), models.loader())
    assert trainer.global_step == injects.probe.answer["rounds"] == 6 and injects.probe.answer["why"] is None
    assert functional.dropout is dropout and torch.are_deterministic_algorithms_enabled() is mode
    assert module.net[2].p == 0.5 and "configure_gradient_clipping" not in vars(module)
    assert "val_loss" not in trainer.callback_metrics
    trainer.validate(module, models.loader(), verbose=False)  # as scripts do after their fit
    assert gradient_state.read(tmp_path, 0)["gradient"], "what the fit has left is still there"


def test_a_step_that_raises_leaves_nothing_changed(tmp_path: Path) -> None:
    class Raising(Twin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("planted")

    dropout = functional.dropout
    module, trainer = made(Raising, None)
    probe = GradientProbe.into(trainer, tmp_path)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(module, shuffled())
    assert functional.dropout is dropout and probe.answer.get("gradient") is None and not list(tmp_path.iterdir())


# -- from a configuration ---------------------------------------------------------------------------------------------


def test_measure_trains_no_further_and_writes_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recipe_modules.FOLDER, "")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.chdir(tmp_path)
    steps: list[int] = []
    ends = GradientProbe.on_train_batch_end

    def notes(self: Any, trainer: Any, *rest: Any) -> None:
        steps.append(trainer.global_step)
        ends(self, trainer, *rest)

    monkeypatch.setattr(gradient_probe.GradientProbe, "on_train_batch_end", notes)
    job = Job(conf=str(NET), overrides=("run.max_steps=1", "trainer.accumulate_grad_batches=2", "trainer.min_epochs=9"))
    first = measure(job.config(), tmp_path / "out", None, None)
    assert (
        steps[-1] == 6
        and len(steps) == 12
        and [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["gradients.pt"]
    )
    split = job.override("rungs.batch={enabled: true, micro_batch: 3}", "rungs.workers={enabled: true, count: 1}")
    found = measure(split.config(), tmp_path / "arm", None, tmp_path / "out")
    assert found["deviation"] < 1e-6 and found["rungs"]["batch"] is True and first["rungs"] == {}
    assert judge(first, found).passed


@pytest.mark.slow
def test_trials_in_processes_of_their_own(tmp_path: Path) -> None:
    job = Job(conf=str(NET), overrides=("run.max_steps=4",), variation="gradients")
    first = run_trial("base", job, tmp_path / "base")
    second = run_trial(
        "arm", replace(job.override("rungs.amp.enabled=true"), reference=tmp_path / "base"), tmp_path / "arm"
    )
    assert first.ok and second.ok, (first.cause, first.tail, second.cause, second.tail)
    answers = [json.loads((tmp_path / name / "answer.json").read_text()) for name in ("base", "arm")]
    assert [store.decode(answer, GradientAnswer) for answer in answers] == [first.answer, second.answer]
    assert answers[0]["self_deviation"] == 0
    assert answers[1]["precision"] == "bf16" and answers[1]["rungs"] == {"amp": True}
    assert judge(*answers).passed
