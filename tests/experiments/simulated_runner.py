"""A machine that is made up: its steps take as long as its parts say, and nothing is trained. For tests of a climb."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.climb.budget import GRACE_S, ClimbBudget, Length, Spent
from fastloop.experiments.climb.candidates import Start
from fastloop.experiments.climb.interface import CACHED, Needs, Result
from fastloop.experiments.climb.loop import Climb
from fastloop.experiments.tune.search import KnownTimes
from fastloop.records.card import Stack
from fastloop.records.climb import Attempt, ClimbFile, Confirmation
from fastloop.records.experiment import Gate, Outcome
from fastloop.records.plan import Parity

BATCH, MICRO, START_S, RARE_STEPS = 256, 64, 12.0, 40
STILL = 0.15
"""Share of its compile time that a later run of a stack still takes."""


@dataclass(kw_only=True)
class Machine:
    """What a step of 256 samples costs, in milliseconds, and what each rung makes of it."""

    decode_ms: float = 700.0
    """In one process."""
    device_ms: float = 130.0
    host_ms: float = 40.0
    copy_ms: float = 10.0
    exchange_ms: float = 0.0
    factors: Mapping[str, float] = field(
        default_factory=lambda: {
            "amp": 0.4,
            "layout": 1.0,
            "layout+amp": 0.85,
            "fused": 0.99,
            "compile": 0.85,
            "batch": 0.9,
        }
    )
    """Of the device's time; a key with a ``+`` counts only where both are on."""
    noise: float = 0.005
    crashes: Mapping[str, str] = field(default_factory=dict)
    idle: Mapping[str, str] = field(default_factory=dict)
    """Rungs that take no effect, and why."""
    wrong: frozenset[str] = frozenset()
    """Rungs that change the gradient."""
    planned_off: Mapping[str, str] = field(default_factory=dict)
    shows: Mapping[str, str] = field(default_factory=dict)
    """Rungs that the training without them shows to be refused, and why."""
    shuffles: frozenset[str] = frozenset()
    """Rungs that see other samples."""
    classes: Mapping[str, Parity] = field(
        default_factory=lambda: {
            "amp": "approximate",
            "layout": "approximate",
            "fused": "approximate",
            "compile": "approximate",
            "batch": "approximate",
        }
    )
    contention: float = 1.0
    """Beside a training, loading takes so much longer than alone."""
    crowding: float = 1.0
    """Beside workers, computing takes so much longer than without."""
    own_workers: int = 0
    queued: int = 0
    """Batches that these hold; a training of no more steps shows no step time."""
    engine_ms: float | None = None
    """What decodes in the loader's place, beside the training; None: the samples are no image files."""
    ends_at: int | None = None
    """A script that ends by itself after so many steps."""
    rare_ms: float = 0.0
    """Validation, spread over the steps, in trainings of more than `RARE_STEPS`."""
    compiles_s: float = 0.0
    """Each start with `compile` takes so much longer, which no estimate knows beforehand."""
    caches_compiles: bool = False
    """Only the first takes that long, later ones a fraction; and the results tell."""
    launch_bound: bool = False
    tells_copies: bool = True
    """The parts of its steps show how long copies take."""

    def workers(self, stack: Stack) -> int:
        asked = stack.get("workers", {}).get("count", 8) if self.has("workers", stack) else self.own_workers
        return int(asked)

    def has(self, rung: str, stack: Stack) -> bool:
        return rung in stack and rung not in self.idle and rung not in self.planned_off

    def loader_ms(self, stack: Stack) -> float:
        workers = self.workers(stack)
        if self.has("dali", stack) and self.engine_ms is not None:
            return self.engine_ms
        return self.decode_ms / min(workers, 12) if workers else self.decode_ms

    def step_ms(self, stack: Stack, variation: str) -> float:
        """Without noise."""
        device = self.device_ms
        for key, factor in self.factors.items():
            if all(self.has(rung, stack) for rung in key.split("+")):
                device *= factor
        device += 0.0 if variation == "no_exchange" else self.exchange_ms
        hidden = self.has("prefetch", stack) or variation == "resident"
        copies = 0.0 if hidden else self.copy_ms / (2 if self.has("pin", stack) else 1)
        rest = max(device + copies, self.host_ms)
        if variation != "as_it_is":
            return rest
        loader = self.loader_ms(stack)
        if self.workers(stack) or self.has("dali", stack):
            return max(self.crowding * rest, self.contention * loader)
        return max(rest, loader + self.host_ms)


class SimulatedRunner:
    """A Lab on such a machine. What it has done it finds again; its clock runs only while it works."""

    def __init__(
        self,
        machine: Machine,
        *,
        done: dict[str, Result] | None = None,
        best: Mapping[str, int] | None = None,
        before: Callable[[str], None] = lambda at: None,
    ) -> None:
        self.machine, self.done, self.before = machine, {} if done is None else done, before
        self.best = dict(best or {})
        self.now = 0.0
        self.budget = ClimbBudget(1e9, lambda: self.now)
        self.ran: list[str] = []
        """Folders in which something was trained in this call."""
        self.seconds: dict[str, float] = {}
        self.asks: dict[str, tuple[Stack, Ask]] = {}
        self.late: list[str] = []
        """What ended after the budget and its reserve for the end."""
        self.confirmed: list[Stack] = []
        self.given: dict[str, KnownTimes] = {}
        self.confirm_done_s = 0.0
        """Of the confirmation, on an earlier day."""

    def with_budget(self, seconds: float) -> SimulatedRunner:
        self.budget = ClimbBudget(seconds, lambda: self.now)
        return self

    def run(
        self,
        at: str,
        stack: Stack,
        ask: Ask,
        *,
        what: str,
        need_s: float,
        slowest_ms: float = math.inf,
        ladder: str | None = None,
    ) -> Result:
        if at in self.done:
            return self.done[at]
        limit_s = self.budget.begin(what, need_s)
        self.before(at)
        self.ran.append(at)
        self.asks[at] = stack, ask
        found = self._train(at, stack, ask)
        if (found.step_ms or 0.0) > slowest_ms:
            found = Result(ok=False, cause="too slow", too_slow=True, seconds=START_S)
        if found.seconds > limit_s:
            self.now += limit_s
            self.ran.remove(at)
            raise Spent(what)
        self.now += found.seconds
        self.seconds[at] = found.seconds
        if self.budget.left_s() < 0:
            self.late.append(at)
        if found.ok:
            self.done[at] = found
        return found

    def _train(self, at: str, stack: Stack, ask: Ask) -> Result:
        machine = self.machine
        for rung, cause in machine.crashes.items():
            if rung in stack:
                return Result(ok=False, cause=cause, seconds=START_S)
        noise = 1 + machine.noise * random.Random(at).gauss(0, 1)
        if ask.variation == "loader" and ask.counts:
            return self._read_count(noise, stack, ask)
        if ask.variation == "loader":
            ms = noise * machine.loader_ms(stack)
            return Result(
                seconds=START_S + 3,
                loader_ms=ms,
                workers=machine.workers(stack),
                fill_read=True,
                skipped={rung: why for rung, why in machine.planned_off.items() if rung in stack},
            )
        ms = noise * machine.step_ms(stack, ask.variation)
        off = {rung: why for rung, why in {**machine.idle, **machine.planned_off}.items() if rung in stack}
        planned_off = {rung: why for rung, why in machine.planned_off.items() if rung in stack}
        steps = min(ask.steps or 0, machine.ends_at or 10**9)
        if steps <= (ask.warmup or 0):
            cause = f"the fit ended after {steps} steps, before the window, which opens after {ask.warmup}"
            return Result(ok=False, cause=cause, seconds=START_S, steps=steps, ended_at=steps)
        rare_ms = machine.rare_ms if steps > RARE_STEPS else 0.0
        ms += rare_ms
        if steps <= machine.queued:
            return Result(seconds=START_S, steps=steps, ended_at=steps, queued=machine.queued)
        compile_s = taken_s = machine.compiles_s if "compile" in stack else 0.0
        if machine.caches_compiles:
            later = any("compile" in stack for stack, _ in list(self.asks.values())[:-1])
            taken_s = (STILL if later else CACHED + STILL) * compile_s
            compile_s *= STILL if later else 1.0
        return Result(
            seconds=START_S + taken_s + steps * ms / 1e3,
            compile_s=compile_s if machine.caches_compiles else 0.0,
            steps=steps,
            ended_at=steps,
            samples_per_s=1e3 * BATCH / ms,
            step_ms=ms,
            outside_ms=rare_ms,
            global_batch=BATCH,
            micro_batch=MICRO,
            device="cuda",
            queued=machine.queued if ask.variation == "as_it_is" else 0,
            skipped=planned_off,
            inactive=off,
            workers=machine.workers(stack) if ask.variation == "as_it_is" else 0,
            rest_ms=noise * machine.step_ms(stack, "replayed") * (machine.crowding if machine.workers(stack) else 1.0),
            launch_bound=machine.launch_bound,
            waits_ms=noise * machine.loader_ms(stack),
            copies_ms=0.0 if machine.has("prefetch", stack) or not machine.tells_copies else machine.copy_ms,
            classes={rung: machine.classes.get(rung, "exact") for rung in stack},
            refused=machine.shows,
        )

    def _read_count(self, noise: float, stack: Stack, ask: Ask) -> Result:
        """A loader trial with several counts, which ends as the real one does."""
        found: dict[int, float] = {}
        for count in ask.counts:
            before = min(found.values(), default=1e9)
            found[count] = noise * self.machine.loader_ms({**stack, "workers": {"count": count}})
            if found[count] < (ask.enough_ms or 0) or found[count] > 0.9 * before:
                break
        off = {rung: why for rung, why in self.machine.planned_off.items() if rung in stack}
        return Result(seconds=START_S + 4 * len(found), loaders_ms=found, skipped=off, fill_read=True)

    def compare_ledgers(self, base: Stack, arm: Stack, pairs: Sequence[tuple[Result, Result]]) -> Outcome:
        other = (set(arm) - set(base)) & self.machine.shuffles
        gate = Gate(name="ledger", passed=not other, why="step 0 saw other samples" if other else "equal")
        return Outcome(parity_class="exact", passed=False if other else None, why=f"ledger: {gate.why}", gates=(gate,))

    def check_parity(
        self, at: str, base: Stack, arm: Stack, pairs: Sequence[tuple[Result, Result]], *, what: str, need_s: float
    ) -> Outcome:
        if f"{at}/gradient" not in self.done:
            self.budget.begin(what, need_s)
            self.now += 2 * START_S
            self.ran.append(f"{at}/gradient")
            self.done[f"{at}/gradient"] = Result()
        new = set(arm) - set(base)
        if bad := new & self.machine.wrong:
            why = f"{min(bad)} moves it by 0.3"
            gate = Gate(name="gradient", passed=False, why=why, deviation=0.3, limit=0.05)
            return Outcome(parity_class="approximate", passed=False, why=f"gradient: {why}", gates=(gate,))
        return Outcome(
            parity_class="approximate", passed=True, why="held", gates=(Gate(name="ledger", passed=True, why="equal"),)
        )

    def tune(
        self, at: str, stack: Stack, key: str, length: Length, given: KnownTimes, *, what: str, need_s: float
    ) -> Any:
        self.given[at] = given
        if at not in self.done:
            self.budget.begin(what, need_s)
            self.now += 5 * need_s
            self.ran.append(at)
            self.done[at] = Result()
        names = {"workers": "count", "prefetch": "depth", "batch": "micro_batch", "overlap": "bucket_cap_mb"}
        best = self.best.get(key)
        patch = None if best is None else {"rungs": {key: {"enabled": True, names[key]: best}}}
        return Found(key=f"rungs.{key}.{names[key]}", best=best, patch=patch, why="made up")

    def confirm(self, at: str, stack: Stack, length: Length, *, need_s: float) -> Confirmation:
        self.budget.begin("confirming the best stack", need_s, last=True)
        self.now += need_s
        self.done[at] = Result()
        self.confirmed.append(stack)
        return Confirmation(
            ratio=5.0,
            ci95=(4.8, 5.2),
            verdict="faster",
            why="5.0 times",
            mde_pct=3.0,
            runs=3,
            parity=Outcome(parity_class="approximate", passed=True, why="held"),
            run_dir=at,
        )

    def estimate_confirmation_s(self, at: str, needs: Needs) -> float:
        if at in self.done:
            return 0.0
        whole = 3 * needs.base_s + 3 * needs.arm_s + needs.start_s + 2 * needs.gradients_s
        return max(0.0, whole - self.confirm_done_s)

    def reserve(self, *seconds: float) -> None:
        self.budget.reserve(*seconds)

    def left_with_grace_s(self) -> float:
        return self.budget.left_s() + GRACE_S


class Disturbed(SimulatedRunner):
    """Something else runs on the machine during some trainings.

    Args:
        slower: how many times as long as they should the trainings take whose folders end so; ``""`` is every other.
    """

    def __init__(self, machine: Machine, slower: Mapping[str, float], **settings: Any) -> None:
        super().__init__(machine, **settings)
        self.slower = slower

    def _train(self, at: str, stack: Stack, ask: Ask) -> Result:
        result = super()._train(at, stack, ask)
        times = next((each for end, each in self.slower.items() if at.endswith(end)), 1.0)
        if not result.step_ms or not result.samples_per_s or times == 1:
            return result
        return dataclasses.replace(
            result,
            step_ms=result.step_ms * times,
            samples_per_s=result.samples_per_s / times,
            rest_ms=None if result.rest_ms is None else result.rest_ms * times,
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    key: str
    best: int | None
    patch: Mapping[str, Any] | None
    why: str


def make_climb(
    runner: SimulatedRunner,
    *,
    rows: Sequence[Attempt] = (),
    enabled: Sequence[str] = (),
    devices: int = 1,
    allow: Sequence[str] = (),
    warmup: int = 20,
    ladders: Mapping[str, Stack] | None = None,
    ends_at: int | None = None,
    rates: Mapping[str, float | None] | None = None,
) -> Climb:
    """A climb on a made-up machine."""
    start = Start(
        enabled=frozenset(enabled), devices=devices, allow=frozenset(allow), cpus=12, ladders=dict(ladders or {})
    )
    before = ClimbFile(rungs=tuple(rows), ends_at=ends_at, ladders_samples_per_s=dict(rates or {}))
    return Climb(runner, start, warmup=warmup, before=before)
