"""BatchNorm in merged windows: the accumulated training, in float64 to its rounding."""

from __future__ import annotations

import copy
import functools
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.rungs.two_ranks import results
from tests.runs import Net, Run, batches, both, distance, run

MERGE, BLIND = {"batch": {"micro_batch": 32}}, {"batch": {"micro_batch": 32, "batch_norm": "merge"}}
ACCUMULATE: dict[str, Any] = {"accumulate_grad_batches": 4, "precision": "64-true"}
RAGGED = partial(batches, 84, shuffle=True)
"""Windows of 8/8/8/8, 8/8/8/8 and 8/8/4 samples."""


class Norms(Net):
    """BatchNorm of every kind; one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Tanh(),
            torch.nn.Unflatten(1, (4, 2, 2)),
            torch.nn.Conv2d(4, 6, 1),
            torch.nn.BatchNorm2d(6, momentum=None),
            torch.nn.Tanh(),
            torch.nn.Unflatten(1, (3, 2)),
            torch.nn.BatchNorm3d(3, affine=False),
            torch.nn.Flatten(),
            torch.nn.BatchNorm1d(24),
            torch.nn.BatchNorm1d(24, track_running_stats=False),
            torch.nn.Linear(24, 1),
        )
        self.net[10].eval()
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.gradients.append({name: parameter.grad.clone() for name, parameter in self.named_parameters()})


def counts(done: Run) -> list[int]:
    return [int(tensor) for name, tensor in done.weights.items() if name.endswith("num_batches_tracked")]


def difference(plain: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> float:
    """Of all tensors as one, relative: a bias before a BatchNorm has a gradient of rounding alone."""
    names = [name for name in plain if plain[name].is_floating_point()]
    norm = sum(float(plain[name].square().sum()) for name in names)
    return (sum(float((plain[name] - ours[name]).square().sum()) for name in names) / norm) ** 0.5


@pytest.mark.parametrize("micro", [16, 23, 32])
def test_equal_to_accumulation(micro: int) -> None:
    rungs = {"batch": {"micro_batch": micro}}
    plain, ours = both(rungs, RAGGED, Norms, max_epochs=3, **ACCUMULATE)
    verdict = ours.verdict("batch")
    assert verdict.took and verdict.parity_class == "approximate"
    whole = micro // 8
    assert verdict.why.endswith(f"; 5 BatchNorm layers kept separate statistics for up to {whole} batches")
    assert ours.seen("batch")["grouped_norms"] == 5 and ours.seen("batch")["groups"] == whole
    assert ours.module.samples == plain.module.samples and len(plain.module.gradients) == 9
    steps = zip(plain.module.gradients, ours.module.gradients, strict=True)
    assert difference(*next(steps)) < 1e-14 and all(difference(*pair) < 1e-12 for pair in steps)
    buffers = [name for name, _ in plain.module.named_buffers()]
    mine, theirs = ({name: done.weights[name] for name in buffers} for done in (ours, plain))
    assert difference(theirs, mine) < 1e-13 and difference(plain.weights, ours.weights) < 1e-12
    assert counts(ours) == counts(plain) == [33, 33, 33, 0]


def test_running_statistics_after_one_step() -> None:
    plain, ours = both(MERGE, RAGGED, Norms, max_steps=1, **ACCUMULATE)
    running = [name for name in plain.weights if "running" in name]
    assert len(running) == 8
    for name in running:
        a, b = plain.weights[name], ours.weights[name]
        assert float((a - b).abs().max()) <= 1e-15 * float(a.abs().max()), name


def test_merged_statistics_are_another_training() -> None:
    """The control of all the others."""
    plain, ours = both(BLIND, RAGGED, Norms, max_epochs=3, **ACCUMULATE)
    # A layer without running statistics couples samples in the loss itself, which the first window shows.
    assert "not a mean over samples" in ours.verdict("batch").why and distance(plain, ours) == 0
    plain, ours = both(BLIND, RAGGED, Tracked, max_epochs=3, **ACCUMULATE)
    assert ours.verdict("batch").took and ours.verdict("batch").parity_class == "changes-training"
    assert distance(plain, ours) > 1e-3 and counts(plain) == [33] and counts(ours) == [9 + 3]
    assert "grouped_norms" not in ours.seen("batch")
    plain, ours = both(MERGE, RAGGED, Tracked, max_epochs=3, **ACCUMULATE)
    assert distance(plain, ours) < 1e-12 and counts(ours) == [33]


class Tracked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


class Tokens(Tracked):
    """Four of two numbers each; BatchNorm gets them all as rows, sample after sample."""

    time_first = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)

    def loss(self, batch: Any) -> torch.Tensor:
        x = batch[0].unflatten(1, (4, 2))
        rows = x.transpose(0, 1) if self.time_first else x
        rows = self.norm(rows.flatten(0, 1)).view(rows.shape)
        x = rows.transpose(0, 1) if self.time_first else rows
        return torch.nn.functional.mse_loss(self.net(x.flatten(1)), batch[1])


class TimeFirst(Tokens):
    time_first = True


class Views(Tracked):
    """Two of each sample, one behind the other."""

    def loss(self, batch: Any) -> torch.Tensor:
        first, second = self.net(torch.cat([batch[0], batch[0].flip(1)])).chunk(2)
        return torch.nn.functional.mse_loss(first + second, batch[1])


class Some(Tokens):
    """BatchNorm gets only some of the rows."""

    def loss(self, batch: Any) -> torch.Tensor:
        chosen = batch[0][:, 0] > -0.5
        x = batch[0].clone()
        x[chosen, :2] = self.norm(x[chosen, :2])
        return torch.nn.functional.mse_loss(self.net(x), batch[1])


MIXED = "windows run batch by batch: BatchNorm {} does not get the samples of your batches one batch after the other"


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("module", "why"),
    [
        (TimeFirst, MIXED.format("norm")),
        (Views, MIXED.format("net.1")),
        (Some, "windows run batch by batch: "),
    ],
)
def test_what_cannot_be_kept_apart_is_not_merged(module: Any, why: str, precision: Any) -> None:
    settings = {**ACCUMULATE, "precision": precision}
    plain, ours = both(MERGE, RAGGED, module, max_epochs=1, **settings)
    verdict = ours.verdict("batch")
    assert verdict.took is False and verdict.why.startswith(why) and "BatchNorm" in verdict.why
    assert distance(plain, ours) == 0 and counts(plain) == counts(ours)
    # The user's word is on the loss alone.
    word = {"batch": {"micro_batch": 32, "loss_is_mean": True}}
    assert run(word, RAGGED(), module, max_epochs=1, **settings).verdict("batch").took is False


@pytest.mark.parametrize("module", [Tokens, Tracked])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_what_can_be_is(module: Any, precision: Any) -> None:
    ours = run(MERGE, RAGGED(), module, max_epochs=1, **{**ACCUMULATE, "precision": precision})
    assert ours.verdict("batch").took and ours.seen("batch")["apart_steps"] == 0
    plain, ours = both(MERGE, RAGGED, module, max_epochs=2, **ACCUMULATE)
    assert ours.verdict("batch").took and difference(plain.weights, ours.weights) < 1e-12


class Again(Norms):
    """Calls its layers once more in the backward."""

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(checkpoint(self.net, batch[0], use_reentrant=False), batch[1])


def test_with_activation_checkpoints() -> None:
    """Weights; running statistics are moved twice by either run, in another order."""
    plain, ours = both(MERGE, RAGGED, Again, max_epochs=2, **ACCUMULATE)
    assert ours.verdict("batch").took and counts(plain) == counts(ours) == [44, 44, 44, 0]
    weights = [{name: done.weights[name] for name, _ in done.module.named_parameters()} for done in (plain, ours)]
    assert difference(*weights) < 1e-12


class Sees(L.Callback):
    """What a user may do with the model after a batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        x = torch.linspace(-1, 1, 7 * 8, dtype=torch.float64).view(7, 8)  # no multiple of anything
        own, stored = copy.deepcopy(module.net), pickle.loads(pickle.dumps(module.net))
        self.seen.append([copied(x) for copied in (own, stored, own.eval(), stored.eval())])
        assert b"fastloop" not in pickle.dumps(module.net) and own[0].weight.is_leaf


def test_copies_and_the_model_outside_of_its_step_are_plain() -> None:
    looks = Sees(), Sees()
    for rungs, look in zip((None, MERGE), looks, strict=True):
        done = run(rungs, RAGGED(), Norms, callbacks=(look,), max_epochs=1, **ACCUMULATE)
    assert all("forward" not in vars(part) for part in done.module.modules())
    plain = [looks[0].seen[batch] for batch in (3, 7, 10)]
    for one, other in zip(plain, looks[1].seen, strict=True):
        assert all(float((a - b).detach().norm()) < 1e-12 for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("first", "second"), [(None, MERGE), (MERGE, None)])
def test_either_run_continues_from_the_others_checkpoint(first: Any, second: Any, tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    whole = run(None, batches(84), Norms, max_epochs=4, **ACCUMULATE)
    begun = run(first, batches(84), Norms, max_epochs=2, **ACCUMULATE)
    begun.trainer.save_checkpoint(path)
    assert b"fastloop.feeds" not in path.read_bytes()
    done = run(second, batches(84), Norms, ckpt=path, max_epochs=4, **ACCUMULATE)
    # Lightning reads a checkpoint before it makes the module one of float64.
    assert list(done.weights) == list(whole.weights) and difference(whole.weights, done.weights) < 1e-6
    assert counts(done) == counts(whole) == [44, 44, 44, 0]


def test_undo_after_a_failure() -> None:
    class Raises(Norms):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            kept.append([part for part in self.modules() if "forward" in vars(part)])
            raise RuntimeError("planted")

    kept: list[Any] = []
    module = Raises()
    before = [dict(vars(part)) for part in module.net]
    with pytest.raises(RuntimeError, match="planted"):
        run(MERGE, RAGGED(), lambda: module, max_epochs=1, **ACCUMULATE)
    assert len(kept[0]) == 5, "it was on"
    assert [set(vars(part)) for part in module.net] == [set(each) for each in before]


@pytest.fixture
def graphs(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs that were captured; run as they are."""
    made: list[str] = []
    really = torch.compile

    def keep(graph: Any, _inputs: Any) -> Any:
        made.append(str(graph.code))
        return graph.forward

    def compile_kept(function: Any, *, options: Any, dynamic: Any) -> Any:
        return really(function, backend=keep, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", compile_kept)
    return made


@pytest.mark.parametrize("rehearsal", ["on", "off"])
def test_compiled(rehearsal: str, graphs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, made in the rehearsal already where there is one, and the same training."""
    from tests import runs

    monkeypatch.setattr(runs, "watching", functools.partial(runs.watching, rehearsal=rehearsal))
    plain, ours = both({**MERGE, "compile": {}}, partial(batches, 96), Norms, max_epochs=3, **ACCUMULATE)
    assert ours.verdict("batch").took and ours.verdict("compile").took, ours.verdict("compile").why
    assert len(graphs) == 1 and graphs[0].count("torch.rsqrt(") == 4 and graphs[0].count("batch_norm(") == 1
    assert ours.seen("compile")["graphs"] == 1 and not ours.seen("compile")["recompiles"]
    assert difference(plain.weights, ours.weights) < 1e-12 and counts(plain) == counts(ours) == [36, 36, 36, 0]


def test_compiled_with_short_windows(graphs: list[str]) -> None:
    """The pieces of 16 and 4 samples hold 2 groups and 1: at most one more graph, and the rest runs eagerly."""
    plain, ours = both({**MERGE, "compile": {}}, RAGGED, Norms, max_epochs=8, **ACCUMULATE)
    assert ours.verdict("batch").took and ours.verdict("compile").took, ours.verdict("compile").why
    assert len(graphs) == 2 and not ours.seen("compile")["failures"]
    assert difference(plain.weights, ours.weights) < 1e-12 and counts(plain) == counts(ours) == [88, 88, 88, 0]


@pytest.mark.multirank
def test_two_ranks() -> None:
    """DDP hands out the first rank's buffers before each window, in either run."""
    for rank in results():
        plain, ours, blind = (rank[f"norms {name}"] for name in ("accumulated", "grouped", "merged"))
        assert ours["took"] == {"batch": True} and ours["steps"] == plain["steps"] > 10
        assert ours["samples"] == plain["samples"]
        assert difference(plain["weights"], ours["weights"]) < 1e-12
        assert difference(plain["weights"], blind["weights"]) > 1e-3
