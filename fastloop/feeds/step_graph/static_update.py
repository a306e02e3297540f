"""An optimizer's update, recorded once and replayed on gradients that stay at fixed addresses.

Only torch's fused optimizers: they count their steps on the device, so that an update does nothing on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fastloop.errors import NotApplicable
from fastloop.feeds.step_graph.recording import CudaRecorder
from fastloop.feeds.step_graph.static_step import Gradients, gradients_aside

KINDS = ("Adam", "AdamW", "SGD")
"""Classes of torch.optim. The others have no fused form on CUDA."""
RATE, CAPTURABLE = "lr", "capturable"
_PLAIN = (type(None), bool, int, float, str)


class StaticUpdate:
    """The update of one optimizer. A replay reads the current learning rates, as 32-bit numbers. All else is fixed: the
    settings, and the addresses of parameters, gradients and state.

    Args:
        gradients: the parameters, and the tensors that hold their gradients at each replay. Other parameters have no
            gradients.

    Raises:
        NotApplicable: this optimizer cannot be recorded, or not yet.
    """

    def __init__(self, optimizer: Any, gradients: Gradients) -> None:
        grouped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        self._optimizer, self._gradients = optimizer, [pair for pair in gradients if id(pair[0]) in grouped]
        if (why := self._refuse()) is not None:
            raise NotApplicable(why)
        owners = {id(parameter) for parameter, _ in self._gradients}
        self._groups = list(optimizer.param_groups)
        self._settings = [_read_settings(group) for group in self._groups]
        self._others = [each for group in self._groups for each in group["params"] if id(each) not in owners]
        """Parameters without a gradient."""
        self._rates = [group[RATE] for group in self._groups]
        device = self._gradients[0][0].device
        self._sent = [torch.tensor(rate, dtype=torch.float32, device=device) for rate in self._rates]
        """The rates on the device."""
        self._replay: Callable[[], None] = lambda: None
        with self.handed_over():
            self._addresses = self._locate()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that an update writes to."""
        return [parameter.detach() for parameter, _ in self._gradients]

    @property
    def state(self) -> list[torch.Tensor]:
        """The optimizer's tensors that an update writes to."""
        states = (self._optimizer.state.get(parameter, {}) for parameter, _ in self._gradients)
        return [each for state in states for each in state.values() if isinstance(each, torch.Tensor)]

    @contextlib.contextmanager
    def handed_over(self) -> Iterator[None]:
        """Inside the context, the parameters have the gradients that replays read, and other parameters have none."""
        with gradients_aside([*(parameter for parameter, _ in self._gradients), *self._others]):
            for each in self._others:
                each.grad = None
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            yield

    def run_eagerly(self) -> None:
        """Update once with torch's own code, without hooks. Call this while gradients are handed over."""
        type(self._optimizer).step.__wrapped__(self._optimizer)

    def record(self, recorder: CudaRecorder) -> None:
        """Record an update. Call this while gradients are handed over. The recorder may or may not run the update."""

        def work() -> Sequence[torch.Tensor]:
            self.run_eagerly()
            return ()

        with self._made_recordable():
            _, self._replay = recorder.record(work)

    def replay(self) -> None:
        """Update once by replaying the recording, with the current learning rates."""
        for place, group in enumerate(self._groups):
            if (rate := group[RATE]) != self._rates[place]:
                self._rates[place] = rate
                self._sent[place].fill_(rate)
        self._replay()

    def has_settings(self) -> bool:
        """Whether the optimizer has the groups and settings of the recording."""
        groups = self._optimizer.param_groups
        return (
            len(groups) == len(self._groups)
            and all(mine is theirs for mine, theirs in zip(groups, self._groups, strict=True))
            and [_read_settings(group) for group in groups] == self._settings
            and all(isinstance(group[RATE], float) for group in groups)
        )

    def has_addresses(self) -> bool:
        """Whether parameters, gradients and state are where the recording reads and writes them."""
        return self._locate() == self._addresses and all(each.grad is None for each in self._others)

    def _refuse(self) -> str | None:
        optimizer, kind = self._optimizer, type(self._optimizer)
        if kind not in [getattr(torch.optim, name) for name in KINDS] or not hasattr(kind.step, "__wrapped__"):
            return f"{kind.__name__} is not one of {', '.join(KINDS)}"
        if not all(group.get("fused") is True and not group.get("differentiable") for group in optimizer.param_groups):
            return f"{kind.__name__} is not fused"
        if any(type(group[RATE]) is not float for group in optimizer.param_groups):
            return "a learning rate is not a float"
        if not self._gradients:
            return "no parameter has a gradient"
        if any(parameter.dtype is torch.float64 for parameter, _ in self._gradients):
            return "parameters have 64 bits, and a recorded learning rate has 32"
        stateless = {
            id(each) for group in optimizer.param_groups if group.get("momentum") == 0 for each in group["params"]
        }
        states = [optimizer.state.get(each, {}) for each, _ in self._gradients if id(each) not in stateless]
        if not all(state and None not in state.values() for state in states):
            return "a parameter has not been updated yet"
        return None

    def _locate(self) -> list[int]:
        """Return the addresses of parameters, gradients and state. Runs at every step."""
        found: list[int] = []
        state = self._optimizer.state
        for parameter, _ in self._gradients:
            gradient = parameter.grad
            found += (parameter.data_ptr(), 0 if gradient is None else gradient.data_ptr())
            found += [each.data_ptr() for each in state.get(parameter, {}).values() if isinstance(each, torch.Tensor)]
        return found

    @contextlib.contextmanager
    def _made_recordable(self) -> Iterator[None]:
        """Inside the context, the optimizer reads learning rates from the device."""
        before = [{name: group[name] for name in (RATE, CAPTURABLE) if name in group} for group in self._groups]
        for group, rate in zip(self._groups, self._sent, strict=True):
            group.update({RATE: rate, **({CAPTURABLE: True} if CAPTURABLE in group else {})})
        try:
            yield
        finally:
            for group, known in zip(self._groups, before, strict=True):
                group.update(known)


def _read_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings without its learning rate, which schedules change; tensors and lists as their ids."""
    plain = {name: value if _is_plain(value) else id(value) for name, value in group.items() if name != RATE}
    return {**plain, "count": len(group["params"])}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))
