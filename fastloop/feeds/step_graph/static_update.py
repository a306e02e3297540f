"""An optimizer's update, recorded once and replayed on gradients that stay at fixed addresses.

Only torch's fused optimizers: they count their steps on the device, so that an update does nothing on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fastloop.errors import NotApplicable
from fastloop.feeds.batch_tree import iterate_tensors
from fastloop.feeds.step_graph.recording import CudaRecorder
from fastloop.feeds.step_graph.static_step import gradients_aside

KINDS = ("Adam", "AdamW", "SGD")
"""Of torch.optim. The others have no fused form on CUDA."""
RATE, CAPTURABLE = "lr", "capturable"
_PLAIN = (type(None), bool, int, float, str)


class StaticUpdate:
    """The update of one optimizer. A replay reads learning rates anew, as 32-bit numbers; a recording holds only as
    long as all else in the optimizer is as it was.

    Args:
        gradients: the parameters, and the tensors that hold their gradients at each replay. Others have none.

    Raises:
        NotApplicable: this optimizer cannot be recorded, or not yet.
    """

    def __init__(self, optimizer: Any, gradients: Sequence[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        self._optimizer, self._gradients = optimizer, list(gradients)
        if (why := self._refuse()) is not None:
            raise NotApplicable(why)
        owners = {id(parameter) for parameter, _ in gradients}
        self._groups = list(optimizer.param_groups)
        self._settings = [_read_settings(group) for group in self._groups]
        self._others = [each for group in self._groups for each in group["params"] if id(each) not in owners]
        self._state, self._known = optimizer.state, self._locate_state()
        self._rates = [float(group[RATE]) for group in self._groups]
        device = gradients[0][0].device
        self._sent = [torch.tensor(rate, dtype=torch.float32, device=device) for rate in self._rates]
        self._replay: Callable[[], None] = lambda: None

    @property
    def written(self) -> list[torch.Tensor]:
        """What an update writes to: the parameters, and their state."""
        states = [dict(self._state.get(parameter, {})) for parameter, _ in self._gradients]
        return [*(parameter.detach() for parameter, _ in self._gradients), *iterate_tensors(states)]

    @contextlib.contextmanager
    def handed_over(self) -> Iterator[None]:
        """The parameters have the gradients that replays read, and others none."""
        with gradients_aside([*(parameter for parameter, _ in self._gradients), *self._others]):
            for each in self._others:
                each.grad = None
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            yield

    def run(self) -> None:
        """Update once without recording, while gradients are handed over."""
        type(self._optimizer).step.__wrapped__(self._optimizer)  # without hooks

    def record(self, recorder: CudaRecorder) -> None:
        """Record an update, while gradients are handed over. The recorder may or may not run it."""

        def work() -> Sequence[torch.Tensor]:
            self.run()
            return ()

        with self._made_recordable():
            _, self._replay = recorder.record(work)

    def replay(self) -> None:
        """Update once by the recording, at the present learning rates."""
        for place, group in enumerate(self._groups):
            if (rate := group[RATE]) != self._rates[place]:
                self._rates[place] = rate
                self._sent[place].fill_(rate)
        self._replay()

    def holds(self) -> bool:
        """Whether the gradients are where the recording reads them, and the optimizer is as it was."""
        return (
            all(parameter.grad is gradient for parameter, gradient in self._gradients)
            and all(each.grad is None for each in self._others)
            and self._optimizer.state is self._state
            and self._locate_state() == self._known
            and len(self._optimizer.param_groups) == len(self._groups)
            and [_read_settings(group) for group in self._optimizer.param_groups] == self._settings
            and all(isinstance(group[RATE], float) for group in self._groups)
        )

    def _refuse(self) -> str | None:
        optimizer, kind = self._optimizer, type(self._optimizer)
        if kind not in [getattr(torch.optim, name) for name in KINDS] or not hasattr(kind.step, "__wrapped__"):
            return f"{kind.__name__} is none of {', '.join(KINDS)}"
        if not all(group.get("fused") is True and not group.get("differentiable") for group in optimizer.param_groups):
            return f"{kind.__name__} is not fused"
        if any(not isinstance(group[RATE], float) for group in optimizer.param_groups):
            return "its learning rate is no plain number"
        if not self._gradients or getattr(optimizer, "grad_scale", None) is not None:
            return "it has nothing to update, or a loss scale"
        stateful = kind is not torch.optim.SGD or any(group["momentum"] for group in optimizer.param_groups)
        states = [optimizer.state.get(parameter) for parameter, _ in self._gradients]
        if stateful and not all(state and None not in state.values() for state in states):
            return "not all parameters have been updated yet"
        return None

    def _locate_state(self) -> Any:
        """Where the state of the first and the last parameter is: a state that is loaded replaces all of it."""
        ends = [self._optimizer.state.get(self._gradients[place][0], {}) for place in (0, -1)]
        return len(self._optimizer.state), [id(each) for state in ends for each in state.values()]

    @contextlib.contextmanager
    def _made_recordable(self) -> Iterator[None]:
        """Learning rates are read from the device, as for the time of this only."""
        before = [{name: group[name] for name in (RATE, CAPTURABLE) if name in group} for group in self._groups]
        for group, rate in zip(self._groups, self._sent, strict=True):
            group.update({RATE: rate, **({CAPTURABLE: True} if CAPTURABLE in group else {})})
        try:
            yield
        finally:
            for group, known in zip(self._groups, before, strict=True):
                group.update(known)


def _read_settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings but for its learning rate, which schedules change; of tensors and lists their addresses."""
    plain = {name: value if _is_plain(value) else id(value) for name, value in group.items() if name != RATE}
    return {**plain, "count": len(group["params"])}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))
