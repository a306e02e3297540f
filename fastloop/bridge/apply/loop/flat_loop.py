"""Runs a batch of automatic optimization in the order of Lightning's own loop, without its time-consuming detours.

`HookCalls` replaces ``lightning.pytorch.trainer.call``, and Lightning's own functions run with it. `FlatLoop` replaces
two functions of the epoch loop and one of the optimization. Both rely on the exact source that they replace: if it
differs, or a batch is not a plain one, Lightning's own functions run.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from fastloop.bridge import namespaces
from fastloop.bridge.apply.loop.known_loops import HOOKS_PER_BATCH
from fastloop.bridge.watch.phases import NOTHING


class HookCalls:
    """Calls the hooks that Lightning calls, with the same arguments, but without overhead that has no visible effect.

    Its methods have the names of the functions in ``trainer/call.py``. Those write each hook's name through
    ``Module.__setattr__``, 44 times a step, and time each hook for the profiler, even empty ones: 90 us a step.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        space = namespaces.find_namespace(trainer)
        base, callback = (namespaces.load(space, name) for name in ("core.LightningModule", "callbacks.Callback"))
        kinds = [namespaces.load(space, f"plugins.precision.{name}") for name in ("Precision", "MixedPrecision")]
        self._module, self._attributes = module, vars(module)
        self._empty = {getattr(kind, name) for kind in (base, callback) for name in HOOKS_PER_BATCH}
        self._clip, self._clip_own = base.configure_gradient_clipping, base.clip_gradients
        self._clippers = [kind.clip_gradients for kind in kinds]
        self._passes = namespaces.load(space, "profilers.PassThroughProfiler")
        self._silent = trainer.profiler if type(trainer.profiler) is self._passes else None
        self._profiler, self._quiet = trainer.profiler, True

    def has_effect(self, hook: Any) -> bool:
        """Whether calling the hook has any effect."""
        return getattr(hook, "__func__", None) not in self._empty and callable(hook)

    def ignores_empty_hooks(self, trainer: Any) -> bool:
        """Whether no user profiler records empty hooks; one may be set in mid-run."""
        if trainer.profiler is not self._profiler:
            self._profiler, self._quiet = trainer.profiler, isinstance(trainer.profiler, self._passes)
        return self._quiet

    def profile(self, trainer: Any, action: str) -> Any:
        """The profiler's context, or an empty one if the profiler records nothing."""
        return NOTHING if trainer.profiler is self._silent else trainer.profiler.profile(action)

    def bind_to(self, *owners: Any) -> Iterator[tuple[Any, str, Any]]:
        """Yield what to set on Lightning's objects: copies of their functions that call hooks through this object."""
        theirs = namespaces.load(namespaces.find_namespace(owners[0]), "trainer.call")
        for owner in owners:
            for name in set(dir(type(owner))) - set(vars(owner)):
                function = getattr(type(owner), name)
                if getattr(function, "__globals__", {}).get("call") is theirs and _calls_hooks(function.__code__):
                    space = {**function.__globals__, "call": self}
                    more = function.__defaults__, function.__closure__
                    ours = types.FunctionType(function.__code__, space, name, *more)
                    ours.__kwdefaults__ = function.__kwdefaults__
                    yield owner, name, types.MethodType(ours, owner)

    def _call_lightning_module_hook(self, trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        hook = getattr(self._module, hook_name)
        function = getattr(hook, "__func__", None)
        idle = function in self._empty or (function is self._clip and self._clips_nothing(trainer))
        if (idle and self.ignores_empty_hooks(trainer)) or not callable(hook):
            return None
        return self._run(trainer, "[LightningModule]", self._module, hook, hook_name, args, kwargs)

    def _call_strategy_hook(self, trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        hook = getattr(trainer.strategy, hook_name)
        return self._run(trainer, "[Strategy]", trainer.strategy, hook, hook_name, args, kwargs)

    def _call_callback_hooks(self, trainer: Any, hook_name: str, *args: Any) -> None:
        empty = self._empty if self.ignores_empty_hooks(trainer) else ()
        for callback in trainer.callbacks:
            hook = getattr(callback, hook_name)
            if getattr(hook, "__func__", None) not in empty and callable(hook):
                self._run(trainer, "[Callback]", callback, hook, hook_name, (trainer, self._module, *args), {})

    def _run(self, trainer: Any, kind: str, owner: Any, hook: Any, name: str, args: Any, kwargs: Any) -> Any:
        attributes = self._attributes
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], name
        if trainer.profiler is self._silent:
            output = hook(*args, **kwargs)
        else:
            title = owner.state_key if kind == "[Callback]" else type(owner).__name__
            with trainer.profiler.profile(f"{kind}{title}.{name}"):
                output = hook(*args, **kwargs)
        attributes["_current_fx_name"] = before  # as in Lightning, not if the hook raised
        return output

    def _clips_nothing(self, trainer: Any) -> bool:
        """Whether Lightning's own ``configure_gradient_clipping`` has nothing to do."""
        own = getattr(self._module.clip_gradients, "__func__", None)
        clipper = getattr(trainer.precision_plugin.clip_gradients, "__func__", None)
        return not trainer.gradient_clip_val and own is self._clip_own and clipper in self._clippers


def _calls_hooks(code: types.CodeType) -> bool:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return "call" in code.co_names or any(map(_calls_hooks, inner))


class FlatLoop:
    """Runs a batch on one device without repeating known checks, and without dividing the loss by 1.

    The division alone, with one more node in the graph, takes 10 us. Non-empty hooks, the counters, the fetcher, the
    copy of the loss and the optimizer's wrappers stay, since user code may use any of them.
    """

    def __init__(self, trainer: Any, module: Any, calls: HookCalls) -> None:
        space = namespaces.find_namespace(trainer)
        self._trainer, self._module, self._strategy, self._calls = trainer, module, trainer.strategy, calls
        self._loop, self._connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        self._automatic = self._loop.automatic_optimization
        self._training = namespaces.load(space, "trainer.states.RunningStage").TRAINING
        self._closure = namespaces.load(space, "loops.optimization.automatic.Closure")
        self._iterates = namespaces.load(space, "loops.fetchers._DataLoaderIterDataFetcher")
        base, strategy = namespaces.load(space, "core.LightningModule"), type(trainer.strategy)
        self._pass_through = {base.on_before_batch_transfer, base.on_after_batch_transfer}
        self._backward = base.backward
        plain = namespaces.load(space, "strategies.Strategy")
        self._moves_plainly, goes_back = (
            [kind for kind in strategy.__mro__ if name in vars(kind)][1:] == [plain]  # the first is ours
            for name in ("batch_to_device", "backward")
        )
        kinds = [namespaces.load(space, f"plugins.precision.{name}") for name in ("Precision", "MixedPrecision")]
        precision = trainer.precision_plugin
        self._hides_loss = goes_back and all(
            getattr(type(precision), name) in [getattr(kind, name) for kind in kinds]
            for name in ("pre_backward", "backward")
        )
        self._has_context = any(
            getattr(type(precision), name) is not getattr(kinds[0], name) or name in vars(precision)
            for name in ("train_step_context", "forward_context")
        )
        self.batches = 0
        """Number of batches that ran in this loop."""
        self._whole = {
            "advance": self._loop.advance,
            "on_advance_end": self._loop.on_advance_end,
            "run": self._automatic.run,
            "_training_step": self._automatic._training_step,
        }

    def functions(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what to set on Lightning's objects."""
        yield self._loop, "advance", self._advance
        yield self._loop, "on_advance_end", self._end_advance
        yield self._automatic, "run", self._optimize
        if not self._has_context:
            yield self._trainer.precision_plugin, "train_step_context", lambda: NOTHING
        if self._hides_loss:
            yield self._automatic, "_training_step", self._training_step

    def _is_plain(self, fetcher: Any) -> bool:
        return (
            not self._loop.restarting
            and self._trainer.state.stage is self._training
            and not isinstance(fetcher, self._iterates)
            and not self._calls.has_effect(self._module.on_train_batch_start)  # which may skip the rest of the epoch
        )

    def _accumulates(self) -> bool:
        return self._trainer.accumulate_grad_batches != 1 and bool(self._loop._should_accumulate())

    def _advance(self, fetcher: Any) -> None:
        """``_TrainingEpochLoop.advance``."""
        if not self._is_plain(fetcher):
            self._whole["advance"](fetcher)
            return
        trainer, loop, calls, progress = self._trainer, self._loop, self._calls, self._loop.batch_progress
        if loop.val_loop.restarting:
            loop.val_loop.restarting = False
        batch, _, _ = next(fetcher)
        batch_idx = progress.current.ready
        progress.is_last_batch = fetcher.done
        batch = self._strategy.precision_plugin.convert_input(batch)
        batch = self._call_batch_hook("on_before_batch_transfer", batch, 0)
        batch = self._move(batch)
        progress.increment_ready()
        self._begin_batch(batch)
        output = None
        if batch is None:
            loop._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            calls._call_callback_hooks(trainer, "on_train_batch_start", batch, batch_idx)
            calls._call_lightning_module_hook(trainer, "on_train_batch_start", batch, batch_idx)  # empty; profiled
            calls._call_strategy_hook(trainer, "on_train_batch_start", batch, batch_idx)
            progress.increment_started()
            kwargs = loop._build_kwargs(OrderedDict(), batch, batch_idx)
            with calls.profile(trainer, "run_training_batch"):
                if self._module.automatic_optimization:
                    output = self._automatic.run(self._strategy.optimizers[0], batch_idx, kwargs)
                else:
                    output = loop.manual_optimization.run(kwargs)
        progress.increment_processed()
        if self._strategy.lr_scheduler_configs:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if loop._num_ready_batches_reached():
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        calls._call_callback_hooks(trainer, "on_train_batch_end", output, batch, batch_idx)
        calls._call_lightning_module_hook(trainer, "on_train_batch_end", output, batch, batch_idx)
        self._end_batch()
        self.batches += 1

    def _end_advance(self, fetcher: Any) -> None:
        """``_TrainingEpochLoop.on_advance_end``."""
        trainer, loop = self._trainer, self._loop
        stops = trainer.should_stop or trainer.received_sigterm or loop._skip_next_val
        if stops or self._strategy.lr_scheduler_configs or loop._should_check_val_fx(fetcher):
            self._whole["on_advance_end"](fetcher)
        elif not self._accumulates():
            loop._batches_that_stepped += 1

    def _optimize(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        """``_AutomaticOptimization.run``, for a batch that ends with an optimizer step."""
        trainer, automatic, calls = self._trainer, self._automatic, self._calls
        if automatic._skip_backward or self._strategy.handles_gradient_accumulation or self._accumulates():
            return self._whole["run"](optimizer, batch_idx, kwargs)
        epoch, progress = trainer.current_epoch, automatic.optim_progress.optimizer

        def zero_grad() -> None:
            progress.zero_grad.increment_ready()
            calls._call_callback_hooks(trainer, "on_before_zero_grad", optimizer)
            calls._call_lightning_module_hook(trainer, "on_before_zero_grad", optimizer)
            progress.zero_grad.increment_started()
            calls._call_lightning_module_hook(trainer, "optimizer_zero_grad", epoch, batch_idx, optimizer)
            progress.zero_grad.increment_completed()

        closure = self._closure(
            partial(automatic._training_step, kwargs),
            lambda loss: calls._call_strategy_hook(trainer, "backward", loss, optimizer),
            zero_grad if batch_idx % trainer.accumulate_grad_batches == 0 else None,
        )
        progress.step.increment_ready()
        wrapped = self._strategy._lightning_optimizers[0]
        calls._call_lightning_module_hook(trainer, "optimizer_step", epoch, batch_idx, wrapped, closure)
        progress.step.increment_completed()
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()

    def _call_batch_hook(self, name: str, batch: Any, *args: Any) -> Any:
        """``LightningModule._call_batch_hook``."""
        owner = self._trainer._data_connector._datahook_selector.get_instance(name)
        is_empty = getattr(getattr(owner, name), "__func__", None) in self._pass_through
        if is_empty and self._calls.ignores_empty_hooks(self._trainer):
            return batch
        if owner is not self._module:
            return self._module._call_batch_hook(name, batch, *args)
        return self._calls._call_lightning_module_hook(self._trainer, name, batch, *args)

    def _move(self, batch: Any) -> Any:
        """``Strategy.batch_to_device``; ours calls the applier."""
        trainer, strategy = self._trainer, self._strategy
        if not self._moves_plainly or "batch_to_device" in vars(strategy) or strategy.fastloop is None:
            return self._calls._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        args = batch, self._transfer_batch, 0
        return self._calls._run(
            trainer, "[Strategy]", strategy, strategy.fastloop.to_device, "batch_to_device", args, {}
        )

    def _transfer_batch(self, batch: Any) -> Any:
        """``LightningModule._apply_batch_transfer_handler``."""
        batch = self._call_batch_hook("transfer_batch_to_device", batch, self._strategy.root_device, 0)
        return self._call_batch_hook("on_after_batch_transfer", batch, 0)

    def _begin_batch(self, batch: Any) -> None:
        """``_LoggerConnector.on_batch_start``."""
        connector, results = self._connector, self._loop._results
        if connector._first_loop_iter is not False:
            connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None

    def _end_batch(self) -> None:
        """``on_batch_end``, ``increment_completed`` and ``update_train_step_metrics``."""
        trainer, loop, connector, results = self._trainer, self._loop, self._connector, self._loop._results
        if results:
            connector.on_batch_end()
        else:
            results.batch = results.batch_size = None
        loop.batch_progress.increment_completed()
        every = trainer.log_every_n_steps
        due = trainer.should_stop or trainer.fast_dev_run or (every and (loop._batches_that_stepped + 1) % every == 0)
        if due and results:
            connector.update_train_step_metrics()

    def _training_step(self, kwargs: Any) -> Any:
        """``_AutomaticOptimization._training_step``, if no user code gets the loss before its backward."""
        trainer, kind = self._trainer, self._automatic.output_result_cls
        if trainer.accumulate_grad_batches != 1 or self._shows_loss():
            return self._whole["_training_step"](kwargs)
        output = self._calls._call_strategy_hook(trainer, "training_step", *kwargs.values())
        self._strategy.post_training_step()
        if type(output) is torch.Tensor and output.is_floating_point():
            return kind(output)
        return kind.from_training_step_output(output, 1)

    def _shows_loss(self) -> bool:
        """Whether user code currently runs between the step and the end of its backward."""
        module, has_effect = self._module, self._calls.has_effect
        if getattr(module.backward, "__func__", None) is not self._backward:
            return True
        for owner in (module, *self._trainer.callbacks):
            if has_effect(owner.on_before_zero_grad) or has_effect(owner.on_before_backward):
                return True
        return False
