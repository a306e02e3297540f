"""The facts read off Trainers, modules and loaders; and that reading changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from fastloop.bridge.apply import read_facts, read_model
from fastloop.bridge.fit.strategy import mix_in
from fastloop.records.facts import Facts
from tests.models import Regression, loader, pairs, trainer


def facts(module: Any = None, **settings: Any) -> Facts:
    made = trainer(**settings)
    made.strategy.connect(module or Regression())
    return read_facts.read_run_facts(made, made.strategy)


def test_a_plain_run() -> None:
    found = facts()
    assert (found.device, found.world_size, found.local_ranks, found.strategy) == ("cpu", 1, 1, "SingleDeviceStrategy")
    assert found.plain_gradients and not found.is_ddp and found.precision == "32-true" and not found.own_precision
    assert found.automatic_optimization and not found.resuming and found.accumulate == 1
    assert found.batchnorms == found.convs == found.not_mean_losses == found.autocasts == found.transfer_hooks == ()
    assert found.compile_targets == ("net",) and found.loader is None and found.cpu_count >= 1


def test_layers_whose_sizes_the_first_batch_tells() -> None:
    module = Regression()
    module.net = torch.nn.Sequential(torch.nn.LazyConv2d(4, 3), torch.nn.LazyBatchNorm2d(), torch.nn.LazyLinear(1))
    found = facts(module)
    assert found.convs == ("net.0",) and len(found.batchnorms) == 1 and found.classes == 0


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"precision": "bf16-mixed"}, "own_precision", True),
        ({"precision": "bf16-true"}, "precision", "bf16-true"),
        ({"accumulate_grad_batches": 3}, "accumulate", 3),
        ({"accumulate_grad_batches": 3}, "micro_batches", True),
        ({"reload_dataloaders_every_n_epochs": 2}, "reload_every_n_epochs", 2),
        ({"limit_train_batches": 5}, "limit_train_batches", 5),
        ({"val_check_interval": 0.5}, "val_check_interval", 0.5),
        ({"callbacks": GradientAccumulationScheduler({0: 1, 4: 2})}, "accumulation_scheduled", True),
        ({"callbacks": StochasticWeightAveraging(0.1)}, "averages_weights_by_swa", True),
        ({"strategy": "ddp", "devices": 2}, "is_ddp", True),
        ({"strategy": "ddp", "devices": 2}, "local_ranks", 2),
        ({"strategy": DDPStrategy(ddp_comm_hook=print), "devices": 2}, "user_comm_hook", True),
    ],
)
def test_what_the_trainer_was_told(settings: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(facts(), field) != value, "the default: nothing was read"
    assert getattr(facts(**settings), field) == value


def test_deepspeed_is_not_ddp_though_it_inherits_from_it() -> None:
    for kind, ddp, whole in ((DDPStrategy, True, True), (DeepSpeedStrategy, False, False)):
        for made in (kind, mix_in(kind)):
            made = made.__new__(made)
            vars(made)["_ddp_kwargs"] = {}
            assert read_facts._is_ddp(made) == ddp
            assert (read_facts._is_ddp(made) or isinstance(made, SingleDeviceStrategy)) == whole


class Hooks(Regression):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        """Its own way."""


class DataHooks(L.LightningDataModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def test_hooks_of_the_user_and_who_has_them() -> None:
    made, module = trainer(), Hooks()
    made.strategy.connect(module)
    found = read_facts.read_run_facts(made, made.strategy)
    assert found.transfer_hooks == ("on_after_batch_transfer",)
    assert read_facts.find_hook_owner(made, "on_after_batch_transfer") is module
    made.datamodule = data = DataHooks()  # type: ignore[attr-defined]
    assert read_facts.find_hook_owner(made, "on_after_batch_transfer") is data
    assert read_facts.find_hook_owner(made, "transfer_batch_to_device") is None
    plain = Regression()
    plain.transfer_batch_to_device = lambda *args: None  # type: ignore[method-assign,assignment]
    assert read_model.overrides(plain, "transfer_batch_to_device")


class Early(Regression):
    """Each hook gives something else when it is called earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.flip = RandomFlip()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.flip(batch)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch * self.trainer.global_step


class RandomFlip(torch.nn.Module):
    """By its name a random transform."""


class Noisy(Regression):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._blur(batch) * self.trainer.current_epoch

    def _blur(self, batch: Any) -> Any:
        return batch + torch.randn_like(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + torch.randn_like(batch)


class Timeless(Noisy):
    def _blur(self, batch: Any) -> Any:
        return self.net(batch)


def test_hooks_that_would_give_something_else_if_they_were_called_earlier() -> None:
    assert facts(Early()).timed_hooks == ("on_before_batch_transfer", "transfer_batch_to_device")
    assert facts(Noisy()).timed_hooks == ("on_before_batch_transfer",)
    assert facts(Timeless()).timed_hooks == facts(Regression()).timed_hooks == ()


def test_a_package_whose_name_begins_like_lightnings_is_the_users() -> None:
    kind = type(
        "Theirs",
        (Regression,),
        {"on_before_batch_transfer": lambda self, batch, index: batch, "__module__": "pytorch_lib.models"},
    )
    assert read_model.overrides(kind(), "on_before_batch_transfer")


class Suspect(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.sum = torch.nn.CrossEntropyLoss(reduction="sum")
        self.weighted = torch.nn.CrossEntropyLoss(weight=torch.ones(2))
        self.mean = torch.nn.MSELoss()
        self.features = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.BatchNorm2d(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.autocast("cpu"):
            return torch.nn.functional.mse_loss(*batch, reduction="sum")

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.detach_()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.nn.functional.mse_loss(*batch, reduction="none")


class Odds(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = torch.nn.BCELoss()

    def compute_loss(self, odds: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.criterion(odds, y) + torch.nn.functional.binary_cross_entropy(odds, y)

    def other_loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, y)


def test_losses_that_autocast_refuses_are_found() -> None:
    assert facts(Odds()).refused_losses == ("criterion", "compute_loss")


def test_what_a_module_does_as_far_as_its_source_says() -> None:
    found = facts(Suspect())
    assert found.autocasts == ("Suspect.training_step",) and found.detaches_grads == ("Suspect.on_after_backward",)
    assert found.handles_grads == ("Suspect.on_after_backward",)
    losses = {text.split(" ")[0] for text in found.not_mean_losses}
    assert {"sum", "weighted", "Suspect.training_step"} <= losses and not losses & {"mean", "Suspect.validation_step"}
    assert found.batchnorms == ("features.1",) and found.convs == ("features.0",)


def test_a_helper_that_reads_gradients_may_do_so_at_any_time() -> None:
    class Watched(Regression):
        def norm(self) -> float:
            return float(sum(each.grad.norm() for each in self.parameters()))

    class Clipping(Watched):
        def clip(self) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    assert facts(Watched()).handles_grads == () and facts(Clipping()).handles_grads == ("Clipping.clip",)


def test_gradients_that_autograd_returns_were_not_scaled() -> None:
    class Penalized(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0].requires_grad_()
            (found,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            return found.square().mean()

    assert facts(Penalized()).handles_grads == ()


def test_a_class_typed_at_a_prompt_has_no_source_and_is_no_error() -> None:
    space: dict[str, Any] = {"Regression": Regression, "torch": torch}
    exec("class Typed(Regression):\n def training_step(self, batch):\n  torch.autocast('cpu')\n", space)
    assert facts(space["Typed"]()).autocasts == ()


class Bare(L.LightningModule):
    """Layers of torch's own, called through its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch).sum()


class Listed(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2)])
        self.activation = torch.nn.ReLU()
        self.head = torch.nn.Linear(2, 2)


class Tied(Bare):
    """A model whose output layer has the embedding's weight, and so no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(self.one, self.two)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.body(x), self.one.weight)


class Quiet(Bare):
    """Reads no batch_idx."""


class Joined(Tied):
    """Only hands its batch to an inner module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Named(Joined):
    """Only joins its modules; one of them has the name of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.body(x))


class Predicts(L.LightningModule):
    """Its forward is for predictions; training calls the inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) @ self.body[0].weight

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.body(batch).sum()

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch)


class Samples(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None: ...


class Backward(Quiet):
    def on_after_backward(self) -> None: ...


class Clips(L.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)


class Counting(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, 0) * (batch_idx % 2)


@pytest.mark.parametrize(
    ("module", "callbacks", "found"),
    [
        (Quiet, [ModelCheckpoint()], ()),
        (Quiet, [Samples()], ("Samples.on_train_batch_end",)),
        (Backward, [], ("Backward.on_after_backward",)),
        (Counting, [], ("Counting.training_step, which reads batch_idx,",)),
    ],
)
def test_who_would_notice_merged_batches(module: Any, callbacks: list[Any], found: tuple[str, ...]) -> None:
    settings = {"enable_checkpointing": True} if callbacks and isinstance(callbacks[0], ModelCheckpoint) else {}
    assert facts(module(), callbacks=callbacks, **settings).counts_batches == found


def test_which_of_them_may_change_the_training() -> None:
    assert facts(Backward(), callbacks=[Samples(), Clips()]).changes_by_batch == ("Clips.on_after_backward",)


@pytest.mark.parametrize("owner", [Regression(), torch.nn.Linear(2, 2)], ids=["the module", "a layer"])
def test_a_collate_function_that_can_read_the_module_is_known(owner: Any) -> None:
    read = read_facts.read_loader_facts(DataLoader(pairs(), collate_fn=owner.named_children))
    assert read.holds_training == (("collate_fn.__self__",) if isinstance(owner, L.LightningModule) else ())


def test_compile_targets_are_the_outermost_modules_with_parameters() -> None:
    assert list(read_model.list_compile_targets(Listed())) == ["blocks.0", "blocks.1", "head"]
    assert list(read_model.list_compile_targets(Joined())) == ["one", "two", "body"]
    assert list(read_model.list_compile_targets(Named())) == ["one", "two", "body", "linear"]
    assert list(read_model.list_compile_targets(Predicts())) == ["body"]


@pytest.mark.parametrize("module", [Bare(), Tied()], ids=["bare layers", "its own product"])
def test_a_forward_that_does_the_work_itself_is_compiled_as_a_whole(module: Any) -> None:
    assert list(read_model.list_compile_targets(module)) == [""]


class Counts(Tied):
    """Its graph would not fit the next call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._count()
        return torch.nn.functional.linear(self.body(x), self.one.weight)

    def _count(self) -> None:
        self.calls += 1


class Scheduled(Tied):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.body(x), self.one.weight) * min(1.0, self.global_step / 10)


class Keeps(Tied):
    """Only sets an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.nn.functional.linear(self.body(x), self.one.weight)
        return self.kept


def test_a_forward_that_changes_in_every_step_is_not_compiled_as_a_whole() -> None:
    assert list(read_model.list_compile_targets(Scheduled())) == ["one", "two", "body"]
    assert list(read_model.list_compile_targets(Counts())) == ["one", "two", "body"]
    assert list(read_model.list_compile_targets(Keeps())) == [""], "the control"


def compile_in_place(net: torch.nn.Module) -> torch.nn.Module:
    net.compile(backend="eager")
    return net


def compile_forward(net: torch.nn.Module) -> torch.nn.Module:
    net.forward = torch.compile(net.forward, backend="eager")  # type: ignore[method-assign]
    return net


@pytest.mark.parametrize("change", [compile_in_place, compile_forward, lambda net: torch.compile(net, backend="eager")])
def test_what_the_user_compiled_is_seen(change: Any) -> None:
    module = Regression()
    module.net = change(module.net)
    assert facts(module).compiled_by_user[0] == "net" and facts().compiled_by_user == ()


def test_repeated_blocks_stand_together_by_their_shapes() -> None:
    def block(width: int) -> torch.nn.Module:
        return torch.nn.TransformerEncoderLayer(width, 1, width)

    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleList([block(2), block(2), block(4)]), block(2))
    module = Regression()
    module.net = torch.nn.ModuleDict({"stack": torch.nn.Sequential(net, torch.nn.Sequential(net[0], net[0]))})
    assert facts(module).repeated_blocks == (("net.stack.0.1.0", "net.stack.0.1.1"), ("net.stack.0.1.2",))
    assert facts().repeated_blocks == ()
    module.net = torch.nn.ModuleList([block(2), block(2)])  # which the module calls one by one
    assert facts(module).repeated_blocks == (("net.0", "net.1"),)


class Draws(Dataset[Any]):
    def __getitem__(self, index: int) -> float:
        return random.random()

    def __len__(self) -> int:
        return 4


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: loader(), {"batch_size": 8, "batches": 8, "num_workers": 0, "draws_random": ()}),
        (lambda: DataLoader(pairs(), batch_size=None), {"batch_size": None, "auto_collates": False, "batches": 64}),
        (lambda: loader(num_workers=2, persistent_workers=True), {"num_workers": 2, "persistent_workers": True}),
        (lambda: loader(collate_fn=list), {"custom_collate": True}),
        (lambda: DataLoader(Endless(), batch_size=2), {"map_style": False, "batches": None, "batch_size": 2}),
        (lambda: loader(multiprocessing_context="spawn", num_workers=1), {"start_method": "spawn"}),
        (
            lambda: DataLoader(pairs(), batch_sampler=BatchSampler(SequentialSampler(pairs()), 6, False)),
            {"batch_size": 6, "batches": 11},
        ),
        (lambda: DataLoader(pairs(), batch_sampler=[[0, 1, 2], [3]]), {"batch_size": None, "batches": 2}),
        (lambda: [1, 2, 3], {"kind": "list", "is_dataloader": False, "map_style": False, "batches": 3}),
        (lambda: iter([1]), {"is_dataloader": False, "batches": None, "stateful": False}),
    ],
)
def test_what_a_loader_is(made: Any, expected: dict[str, Any]) -> None:
    found = read_facts.read_loader_facts(made())
    assert {name: getattr(found, name) for name in expected} == expected


def test_reading_takes_no_sample_and_draws_no_number() -> None:
    class Counts(Draws):
        taken = 0

        def __getitem__(self, index: int) -> float:
            type(self).taken += 1
            return random.random()

    module = Suspect()
    states = random.getstate(), torch.get_rng_state().tolist(), repr(numpy.random.get_state())
    found = read_facts.read_loader_facts(DataLoader(Counts(), shuffle=True))
    facts(module)
    assert Counts.taken == 0 and found.draws_random
    assert states == (random.getstate(), torch.get_rng_state().tolist(), repr(numpy.random.get_state()))


class Talks(Regression):
    """Mentions autocast( and reduction='sum' without using them."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        # no torch.autocast( here, and no reduction="sum"
        return super().training_step(batch, batch_idx)


class Weighted(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y, weight=torch.ones(1))


class WeightedAnew(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.CrossEntropyLoss(self.weights)(self.net(x), y)


class Unweighted(Regression):
    def __init__(self, weights: Any = None) -> None:
        super().__init__()
        self.criterion = torch.nn.CrossEntropyLoss(weights)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.CrossEntropyLoss(ignore_index=3)(self.net(x), y)


def test_comments_are_no_code_and_weighted_losses_are_seen() -> None:
    assert facts(Talks()).autocasts == () == facts(Talks()).not_mean_losses == facts(Unweighted()).not_mean_losses
    for module in (Weighted, WeightedAnew):
        assert facts(module()).not_mean_losses == (f"{module.__name__}.training_step divides by its class weights",)


class Unsized(BatchSampler):
    def __init__(self) -> None: ...

    def __iter__(self) -> Any:
        return iter([[0], [1, 2]])

    def __len__(self) -> int:
        return 2


def test_a_batch_sampler_without_a_size_is_no_error() -> None:
    assert read_facts.read_loader_facts(DataLoader(pairs(4), batch_sampler=Unsized())).batch_size is None


def test_which_batchnorms_cannot_be_computed_batch_by_batch() -> None:
    class Own(torch.nn.modules.batchnorm._BatchNorm):
        pass

    class Like(torch.nn.BatchNorm2d):
        pass

    model = torch.nn.ModuleDict(
        {"plain": torch.nn.BatchNorm1d(2), "like": Like(2), "synced": torch.nn.SyncBatchNorm(2), "own": Own(2)}
    )
    model["instances"] = torch.nn.InstanceNorm1d(2)  # no statistics of batches
    model["tracks"] = torch.nn.InstanceNorm1d(2, track_running_stats=True)
    found = read_model.read_module(model)
    assert found["batchnorms"] == ("plain", "like", "synced", "own", "tracks")
    assert found["other_batchnorms"] == ("synced", "own", "tracks")
    assert read_model.read_module(model, syncs_norms=True)["other_batchnorms"] == found["batchnorms"]


def _penalize(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(out.sum(), x, create_graph=True)[0]


class Penalized(Regression):
    def penalty(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _penalize(out, x)

    def norm(self, loss: torch.Tensor) -> Any:
        return torch.autograd.grad(loss, self.net[0].weight, retain_graph=True, create_graph=False)  # type: ignore[arg-type]


def test_who_takes_gradients_of_gradients_or_keeps_the_graph() -> None:
    found = read_model.read_module(Penalized())
    assert (found["double_backward"], found["keeps_graph"]) == (("_penalize",), ("Penalized.norm",))
    assert not read_model.read_module(Regression())["double_backward"]
