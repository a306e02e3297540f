"""Chooses the rung that a climb tries next, or says why none is left. Pure: depends only on costs and history."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fastloop.experiments.tune.choice import find_loader_rung, list_tunables, name_tuned_key
from fastloop.judge.prediction import NEAR, WORTH_PCT, compute_ceilings_ms
from fastloop.ladder import collect_cards, regroups
from fastloop.records.card import ClimbState, Family, Patch, Setting, Settings, Stack, Variant, read_int
from fastloop.records.climb import Attempt, Costs, End, count_kept, list_enabled, select_broken, select_unanswered
from fastloop.records.plan import Parity

CEILING_OF: dict[Family, str] = {"feed": "feed", "compute": "compute", "fill": "compute", "sync": "sync"}
"""The ceiling that limits what a family of rungs can gain. Fuller kernels share the ceiling of the compute rungs, since
they fill the same device."""
FIRST: tuple[Family, ...] = ("feed", "compute", "fill", "sync")
"""Families that share a ceiling are tried in this order, and the rungs of a family in the ladder's order."""
UNMEASURED = 0.5
"""Weight of the compute ceiling: no rung can reach it, whereas a trial has reached the others."""
RETRIES = 1
"""How often a rung that was not faster is retried once the stack has grown: some pay only on top of others."""
AGAIN: tuple[End, ...] = ("small", "not_faster", "undecided", "odd")
"""Results after which a retry is worthwhile. A crash, a failed gate and a refusal by the plan are final."""

BROKEN: tuple[End, ...] = ("parity", "crashed")
LADDER, WITHOUT = "ladder-", "without-"
"""Prefixes of keys: of shipped ladders that are tried as a whole, and of rungs that are removed again."""
ON_TOP = "+"
"""Stands between the names of a ladder and of the rungs on top of it."""
LOST_PCT = -50.0
"""Gain in percent of the step: a rung predicted to fall below it is not retried, alone or with its ladder."""
CHANGES_TRAINING: Parity = "changes-training"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A rung or ladder that could be added to the stack."""

    rung: str
    key: str
    """Distinguishes it from other attempts with the same rung, and names its folder."""
    patches: tuple[Patch, ...]
    """Ways to set it, the most promising first."""
    way: Variant = field(default_factory=Variant)
    """The cost that it changes and how it is tried; its settings are in the patches."""
    refused: str | None = None
    """The reason not to try it; None if it should be tried."""

    @property
    def whole(self) -> bool:
        """Whether the candidate is a shipped ladder: its rungs without effect are left out, and the rest stays
        together."""
        return self.key.startswith(LADDER)

    @property
    def ladder(self) -> str | None:
        """The name of the shipped ladder that this is, or is the rest of; None for other candidates."""
        return self.key.removeprefix(LADDER) if self.whole and ON_TOP not in self.key else None

    @property
    def tunes(self) -> str | None:
        """The rung with a number to tune once it is on the stack; None if there is none."""
        return self.rung if self.way.tune and self.rung in list_tunables() else None

    @property
    def family(self) -> Family:
        return collect_cards()[self.rung.partition("+")[0]].family


@dataclass(frozen=True, kw_only=True)
class Start:
    """Facts about the training before the climb changes it; the baseline run fills in those that only a run shows."""

    enabled: frozenset[str] = frozenset()
    """Rungs that the configuration already enables; the climb leaves them as they are."""
    devices: int = 1
    allow: frozenset[str] = frozenset()
    on_cuda: bool = False
    cpus: int = 1
    """CPUs for each rank."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Rungs that a plan would refuse, judging by the training without them, with the reason."""
    micro_batch: int | None = None
    """Samples of a loader batch on one rank."""
    rank_batch: int | None = None
    """Samples of an optimizer step on one rank."""
    image_files: bool = False
    """The samples come from image files."""
    may_keep_workers: bool = False
    """The loader has workers of its own, which could stay between epochs."""
    may_have_more_workers: bool = False
    """The loader has workers of its own, which others could replace."""
    ladders: Mapping[str, Stack] = field(default_factory=dict)
    """Shipped ladders by name: rungs that pay together. Each is tried as a whole before the single rungs."""
    times_loader: bool = True
    """Trials can measure the loader alone; a script does not give access to it."""

    @property
    def batches_per_step(self) -> float:
        return max(1.0, self.rank_batch / self.micro_batch) if self.rank_batch and self.micro_batch else 1.0


@dataclass(frozen=True, kw_only=True)
class Position:
    """The current state of a climb."""

    start: Start
    costs: Costs
    stack: Stack
    rows: Sequence[Attempt] = ()
    """The attempts so far."""
    ladder_rates: Mapping[str, float] = field(default_factory=dict)
    """Samples per second of the start with a shipped ladder on top, from one run of each; only those that are
    worth another look."""

    @property
    def height(self) -> int:
        return count_kept(self.rows)

    def pct(self, ms: float) -> float:
        return 100 * ms / self.costs.now_ms


def choose(known: Position) -> Candidate | str:
    """Choose what to try next: first the fastest shipped ladder, then the next open rung of the family with the largest
    ceiling. Returns the reason if nothing is left."""
    if (ladder := choose_ladder(known)) is not None:
        return ladder
    ceilings = {name: ms for name, ms in compute_ceilings_ms(known.costs).items() if known.pct(ms) >= WORTH_PCT}
    state, start = make_climb_state(known), known.start
    left_out = list_replaced(known.rows) | list_idle(known.rows) | start.enabled
    ways = [
        (rung, card.family, variant)
        for rung, card in collect_cards().items()
        for variant in card.list_variants(state)
        if rung not in left_out and (not variant.changes_training or CHANGES_TRAINING in start.allow)
    ]
    # A prediction by a trial rules out a rung at less cost than an immediate screen.
    ways.sort(key=lambda way: (FIRST.index(way[1]), not way[2].first, way[2].changes == "engine"))
    for ceiling in sorted(ceilings, key=lambda name: -ceilings[name] * (UNMEASURED if name == "compute" else 1)):
        for rung, family, variant in ways:
            if CEILING_OF[family] == ceiling and _is_open(candidate := _make_candidate(rung, variant, start), known):
                # The start shows only that the rung is refused with its plain settings.
                plain = None if variant.theirs else start.refused.get(rung)
                return dataclasses.replace(candidate, refused=candidate.refused or plain)
    return _combine_small(known) or (ceilings and _choose_rest(known)) or _explain_end(known, ceilings)


def list_ladders(start: Start) -> dict[str, Stack]:
    """List what shipped ladders add to the configuration, without rungs known to be refused. Each addition appears
    once; the largest is first, since it probably contains the shorter ones."""
    theirs, added = _list_theirs(start), dict[str, Stack]()
    for name, ladder in start.ladders.items():
        made: dict[str, Settings] = {}
        for rung, settings in ladder.items():
            ways = [way for way in theirs[rung] if way.changes == "gap" or way.settings[0].items() <= settings.items()]
            if rung not in start.enabled and (ways or rung not in start.refused):
                made[rung] = {**settings, **{key: value for way in ways for key, value in way.settings[0].items()}}
        added[name] = made
    found: dict[str, Stack] = {}
    for name, stack in sorted(added.items(), key=lambda each: -len(each[1])):
        if len(stack) > 1 and stack not in found.values():
            found[name] = stack
    return found


def _list_theirs(start: Start) -> dict[str, list[Variant]]:
    """List, by rung, the variants that change what the start's loader already does. A ladder given by name keeps the
    start's workers between epochs by itself."""
    state = ClimbState(
        gaps_count=start.may_keep_workers,
        may_keep_workers=start.may_keep_workers,
        may_have_more_workers=start.may_have_more_workers,
    )
    return {rung: [way for way in card.list_variants(state) if way.theirs] for rung, card in collect_cards().items()}


def list_bundles(known: Position) -> dict[str, Stack]:
    """Return the largest shipped ladder with the variants on top that pay together, if the start offers several of
    these; otherwise nothing."""
    for name, stack in list_ladders(known.start).items():
        state = dataclasses.replace(make_climb_state(known), stack=stack)
        offered = [(rung, variant) for rung, card in collect_cards().items() for variant in card.list_variants(state)]
        taken = {*known.start.enabled, *known.start.refused}
        ways = [(rung, variant) for rung, variant in offered if variant.together and rung not in taken]
        refused = {rung for rung, variant in offered if variant.refused}  # a ladder by name leaves them out itself
        stack = {rung: settings for rung, settings in stack.items() if rung not in refused}
        for rung, variant in ways:
            stack = apply_patch(stack, _make_candidate(rung, variant, known.start).patches[0])
        return {ON_TOP.join([name, *(rung for rung, _ in ways)]): stack} if len(ways) > 1 else {}
    return {}


def make_ladder(name: str, stack: Stack) -> Candidate:
    """Make a candidate of a whole ladder. No trial of a single cost predicts it, so it is screened at once."""
    return Candidate(
        rung="+".join(stack), key=f"{LADDER}{name}", patches=({"rungs": stack},), way=Variant(changes="engine")
    )


def choose_ladder(known: Position) -> Candidate | None:
    """Choose the fastest open ladder, or the shortest of several equally fast ones. Once something is kept, only those
    that were not tried; their rates are above the top's. Rungs that broke the training also break it together with
    others."""
    ladders, tried = list_bundles(known) | list_ladders(known.start), {row.name for row in known.rows}
    made = {name: make_ladder(name, stack) for name, stack in ladders.items()}
    rates = {
        name: rate
        for name, rate in known.ladder_rates.items()
        if name in made and _is_open(made[name], known) and not _is_broken(made[name], known)
    }
    if known.height:
        rates = {name: rate for name, rate in rates.items() if made[name].key not in tried}
    near = [made[name] for name, rate in rates.items() if rate * NEAR >= max(rates.values())]
    return min(near, key=lambda each: len(each.patches[0]["rungs"]), default=None)


def _choose_rest(known: Position) -> Candidate | None:
    """Choose all rungs of a ladder that are not on the stack yet, except those that made the step much longer. Alone
    they did not pay, but together they may, now that the stack has grown."""
    ladders = list_ladders(known.start)
    names = [row.name.removeprefix(LADDER) for row in known.rows if row.kept and row.name.startswith(LADDER)]
    hopeless = {row.rung for row in known.rows if known.pct(row.measured_saved_ms or 0.0) < LOST_PCT}
    gone = {row.rung for row in known.rows if row.ended in ("inactive", *BROKEN)}.union(
        hopeless, *(ladders[name.partition(ON_TOP)[0]] for name in names)
    )
    for name, ladder in ladders.items():
        rest = {rung: settings for rung, settings in ladder.items() if rung not in known.stack and rung not in gone}
        candidate = make_ladder(name, rest)
        if len(rest) > 1 and known.height and _is_open(candidate, known) and not _is_broken(candidate, known):
            return candidate
    return None


def _is_broken(candidate: Candidate, known: Position) -> bool:
    """Whether a candidate contains all rungs of a ladder that broke the training."""
    broken = [row.patch["rungs"].keys() for row in known.rows if row.name.startswith(LADDER) and row.ended in BROKEN]
    return any(each <= candidate.patches[0]["rungs"].keys() for each in broken)


def list_removable(rows: Sequence[Attempt]) -> list[str]:
    """List rungs that the stack has not been measured without, from the top of the ladder down. The last one kept has
    been, if it was added alone."""
    kept = [row for row in rows if row.kept and not row.is_removal]
    stack, last = read_stack(rows), set(list_enabled(kept[-1].patch) if kept else ())
    seen = {row.rung for row in rows if row.is_removal} | (last if len(last) == 1 else set())
    return [rung for rung in reversed(list(collect_cards())) if rung in stack and rung not in seen]


def estimate_first_start_s(rungs: Iterable[str]) -> float:
    """Return the seconds that the first start with these rungs takes longer than later ones: they compile."""
    cards = collect_cards()
    return max((cards[rung].first_start_s for rung in rungs), default=0.0)


def list_replaced(rows: Sequence[Attempt]) -> set[str]:
    """List kept rungs that a later one replaced; together with it they would have no effect."""
    kept = [row for row in rows if row.kept and not row.is_removal]
    return {rung for row in kept for rung in row.patch["rungs"]} - read_stack(kept).keys()


def list_idle(rows: Sequence[Attempt]) -> set[str]:
    """List the rungs that had no effect in the last kept attempt."""
    return next(({*row.idle} for row in reversed(rows) if row.kept), set())


def _explain_end(known: Position, ceilings: Mapping[str, float]) -> str:
    none = "" if known.height or select_broken(known.rows) or select_unanswered(known.rows) else "nothing to gain: "
    if not ceilings:
        return f"{none}no ceiling is above {WORTH_PCT:g} %"
    bounds = ", ".join(f"{known.pct(ms):.0f} %, {name}" for name, ms in ceilings.items())
    return f"{none}no remaining rung is predicted to gain {WORTH_PCT:g} % (upper bound: {bounds})"


def make_climb_state(known: Position) -> ClimbState:
    """Return the current state that the variants of a rung may depend on."""
    start, costs = known.start, known.costs
    return ClimbState(
        on_cuda=start.on_cuda,
        micro_batch=start.micro_batch,
        rank_batch=start.rank_batch,
        one_backward=start.batches_per_step == 1 and not regroups(known.stack),
        launch_bound=costs.launch_bound,
        image_files=start.image_files,
        gaps_count=known.pct(costs.gap_ms) >= WORTH_PCT,
        may_keep_workers=start.may_keep_workers,
        may_have_more_workers=start.may_have_more_workers,
        epochs_end=costs.gap_ms > 0,
        recount=known.start.times_loader and _is_recount_due(known),
        stack=known.stack,
        ended={row.name: row.ended for row in known.rows if row.ended},
    )


def _is_recount_due(known: Position) -> bool:
    """Whether to search for another number of loader workers. The variant for this is named after the number."""
    costs, rung = known.costs, find_loader_rung()
    field, number = list_tunables()[rung].field, name_tuned_key(rung)
    if costs.replayed_ms is None or costs.core_ms <= NEAR * costs.replayed_ms:
        return False
    measured = [count for count, _ in costs.loaders_ms]
    if measured and max(measured) <= read_int(known.stack.get(rung), field, 0):
        return False
    chosen_at = [
        row.at + row.kept
        for row in known.rows
        if row.name == f"{rung}-{field}" or (number in (row.tuned or {}) and (row.kept or row.rung == rung))
    ]
    return max(chosen_at, default=-1) < known.height


def _make_candidate(rung: str, variant: Variant, start: Start) -> Candidate:
    if variant.changes == "loader" and not start.times_loader:
        settings = variant.settings or ({},)  # no trial can predict it then
        variant = dataclasses.replace(variant, changes="engine", settings=settings, tune=False)
    off: Stack = {each: {"enabled": False} for each in variant.replaces}
    return Candidate(
        rung=rung,
        key=f"{rung}-{variant.name}" if variant.name else rung,
        patches=tuple({"rungs": {**make_patch(rung, **settings)["rungs"], **off}} for settings in variant.settings),
        way=variant,
        refused=variant.refused,
    )


def _combine_small(known: Position) -> Candidate | None:
    """Combine rungs that are predicted to gain too little alone but enough together; one trial predicts them."""
    plain = {rung for rung, card in collect_cards().items() if card.tunes is None or card.tunes.trained != "loader"}
    latest = {row.key: row for row in known.rows if row.key in plain}
    now = [row for row in latest.values() if row.at == known.height and row.ended == "small"]
    small = [row for row in now if known.pct(row.predicted_saved_ms or 0.0) > WORTH_PCT / 10]
    if len(small) < 2 or known.pct(sum(row.predicted_saved_ms or 0.0 for row in small)) < WORTH_PCT:
        return None
    merged = {"rungs": {rung: settings for row in small for rung, settings in row.patch["rungs"].items()}}
    names = "+".join(merged["rungs"])
    candidate = Candidate(rung=names, key=names, patches=(merged,))
    return candidate if _is_open(candidate, known) else None


def _is_open(candidate: Candidate, known: Position) -> bool:
    """Whether the candidate was never tried, or may be retried because the stack has grown."""
    if candidate.patches and all(apply_patch(known.stack, patch) == known.stack for patch in candidate.patches):
        return False  # already on the stack, from a ladder
    made = [row for row in known.rows if row.key == candidate.key]
    if not made or candidate.way.repeats:
        return True
    last = made[-1]
    lost = last.ended == "small" and known.pct(last.predicted_saved_ms or 0.0) < LOST_PCT
    return last.ended in AGAIN and last.at < known.height and not lost and len(made) <= RETRIES


# -- A stack of rungs: what a climb has added to the configuration it began with ---------------------------------------


def apply_patch(stack: Stack, patch: Patch) -> Stack:
    """Return the stack with a patch applied; rungs that the patch switches off are removed."""
    rungs = patch.get("rungs") or {}
    merged = {**stack, **{rung: {**stack.get(rung, {}), **settings} for rung, settings in rungs.items()}}
    return {rung: settings for rung, settings in merged.items() if settings.get("enabled") is not False}


def read_stack(rows: Sequence[Attempt]) -> Stack:
    """Return the stack of all kept rungs."""
    stack: Stack = {}
    for row in rows:
        stack = apply_patch(stack, row.patch) if row.kept else stack
    return stack


def make_patch(rung: str, **settings: Setting) -> Patch:
    """Return a patch that enables one rung with these settings."""
    return {"rungs": {rung: {"enabled": True, **settings}}}


def list_overrides(stack: Stack) -> tuple[str, ...]:
    """Return the stack as ``key=value`` arguments."""
    return tuple(
        f"rungs.{rung}.{key}={json.dumps(value)}" for rung, settings in stack.items() for key, value in settings.items()
    )


def count_batches_per_step(known: Position, stack: Stack) -> float:
    """Return the loader batches of an optimizer step with this stack: one if a rung merges them."""
    return 1.0 if regroups(stack) else known.start.batches_per_step


def count_queued(stack: Stack, workers: int) -> int:
    """Return how many batches this stack keeps ready, in its loader workers and on the device."""
    return sum(card.batches_ready(stack.get(rung), workers) for rung, card in collect_cards().items())
