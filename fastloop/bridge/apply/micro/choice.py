"""Which pieces a batch runs in: micro-batches of one size, or the user's own batches of its window.

A merged window may turn out not to be one batch: the user's batches cannot be concatenated, or the loss is not a mean
over samples. Its pieces are then the user's own batches, as in the user's own accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastloop.bridge.apply.live_plan import LivePlan
from fastloop.bridge.apply.micro.gradient_check import UNKNOWN, Weighing, explain_difference, weigh_pieces
from fastloop.bridge.apply.micro.room import giving_back
from fastloop.bridge.apply.micro.search import SizeSearch, fits_in_memory
from fastloop.bridge.apply.micro.size import PieceSize
from fastloop.bridge.apply.micro.windows import Merged, MergedWindows, StepCall
from fastloop.bridge.apply.rehearse.ranks import gather_first
from fastloop.bridge.apply.site import LiveSite
from fastloop.errors import FastLoopError
from fastloop.feeds.batch_tree import CannotRegroup, count_rows
from fastloop.feeds.splitting import Piece, cut, cut_at

RARER = 4
"""Each comparison of gradients comes this many times as many batches after the first as the one before."""
FEW, SELDOM = 8, 128
"""Gradients are also compared in an epoch's first batch, unless there were more than `FEW` comparisons, plus one per
`SELDOM` batches, already."""
LIMITED = ("cuda",)
"""Devices on which a step is tried before it may run out of memory."""


class Chosen(NamedTuple):
    """The pieces of one batch."""

    pieces: list[Piece]
    apart: bool = False
    """The pieces are the user's own batches of a window: each has its own batch_idx and may be skipped separately."""


class PieceChoice:
    """Decides a run's micro-batches on the first batch that allows it, and cuts each batch accordingly.

    Under ``strict``, a batch that cannot be cut or merged is an error, raised before anything is computed from it.

    Args:
        micro: samples per piece, or a search that finds the number on the first window.
        rung: the rung that has this setting.
        wants: all wants of the plan for the train loader.
    """

    def __init__(
        self, micro: int | SizeSearch, rung: str, wants: Mapping[str, Any], site: LiveSite, live: LivePlan
    ) -> None:
        self.rung, self.site, self._live = rung, site, live
        self.groups = site.groups if wants.get("step.batch_norm") == "groups" else None
        """Receives the number of user batches in each piece, which then contains only whole ones; None if no rung needs
        that."""
        self._compares = not wants.get("step.loss_is_mean")
        """Whether gradients decide if windows are merged, or batches cut; otherwise they always are."""
        self._unmerged: str | None = wants.get("step.unmerged")
        """Why the batches of a window are not merged; None if they are, or if there are no windows."""
        self._undecided = self._compares or self.groups is not None
        self._seen, self._next = 0, 1
        self._epoch, self._compared = 0, [0]
        self.windows = MergedWindows()
        self._size = PieceSize(micro, self.windows, self.groups, site, live)
        self.whole: tuple[int, int] | None = None
        """Samples in a full batch and in an epoch's last batch; None if unknown."""
        self.refused: str | None = None
        """Why no window is merged, or no batch cut, in this run."""
        self.weighing: Weighing | None = None
        self._misfit = False
        self._problem: str | None = None
        self._lacked_room = False
        """Whether the last window did not fit; the rungs that it lacked may not have started since."""
        self._steps = self._changed = self._apart_steps = 0
        self.uncut = 0
        """Batches that could not be cut."""
        self._apart_why = ""
        self._largest: tuple[int, ...] = ()
        self._unequal: dict[str, None] = {}
        """Names of logged values that are no means over samples."""

    def evidence(self) -> Mapping[str, Any]:
        """How many batches ran, how many of them in other pieces than the loader's own, and how many could not be cut,
        and why; piece sizes of the largest batch; how many loader batches were merged into one."""
        return {
            "steps": self._steps,
            "changed_steps": self._changed,
            "uncut_steps": self.uncut,
            "problem": self._problem,
            "micro_batches": list(self._largest),
            "samples": sum(self._largest),
            "unmerged": self._unmerged,
            "merged_batches": self.windows.sampler.window if self.windows.sampler else 1,
            "apart_steps": self._apart_steps,
            "apart_why": self._apart_why or None,
            "weighed_by": None if self.weighing is None else str(self.weighing.counter),
            "unequal_logs": list(self._unequal),
            **self._size.evidence(),
        }

    @property
    def micro(self) -> int:
        """Samples per piece; 0 until a search has found it."""
        return self._size.samples

    @property
    def may_grow(self) -> bool:
        """Whether micro-batches become larger once rungs that cost nothing to switch are on, because they fit then."""
        return self._lacked_room or self._size.may_grow

    @property
    def runs_whole(self) -> bool | None:
        """Whether batches, or merged windows, run in one piece each; None until that is decided."""
        if self.refused is not None:
            return self.windows.sampler is None
        return len(self._largest) == 1 if self._largest else None

    def choose(self, batch: Any, rest: Sequence[Any]) -> Chosen:
        """Cut the batch into micro-batches of the chosen size, or into the user's batches of its window. `rest` are the
        arguments of training_step after the batch."""
        window = self._read_window(batch)
        call = StepCall(batch, rest, window)
        if self._size.is_open and window is not None and len(window.sizes) < window.full:
            self._size.samples = window.sizes[0]  # a run resumed inside a window searches in the next one
            return Chosen(self._cut(call))
        self._update_size(call)
        if window is None:
            return Chosen(self._split(call))
        if len(window.sizes) == 1:
            return Chosen(self._cut(call), apart=self.refused is not None)
        own, reason = self._decide_window(call, window)
        if reason is None or not own:
            return Chosen(self._cut(call))
        self._warn_apart(self.refused or reason)
        self._steps, self._apart_steps = self._steps + 1, self._apart_steps + 1
        return Chosen(own, apart=True)

    def _read_window(self, batch: Any) -> Merged | None:
        return self.windows.read(self.site.trainer.fit_loop.total_batch_idx, batch)

    def _update_size(self, call: StepCall) -> None:
        """Find the micro-batch's size, or change it; if it is that of the user's own batches, these stay."""
        if self._size.is_open or self.refused is None:
            before = self._size.samples
            self._size.update(call)
            if self._size.samples > before > 0:  # merged otherwise than in the first comparison
                self._undecided, self._next = self._compares or self.groups is not None, self._seen + 1
                self._largest = ()
        if self._size.kept is not None and self.refused is None:
            self.refused = self._apart_why = self._size.kept
            self._undecided = False

    def _is_due(self) -> bool:
        """Whether gradients are compared on this batch or window: the first, and rarer ones later, for a loss may
        change its kind, perhaps with the epoch, and the first samples may have no padding."""
        if self.refused is not None or not (self._undecided or self._compares):
            return False
        self._seen += 1
        is_rare, self._epoch, last = self._seen >= self._next, self.site.trainer.current_epoch, self._epoch
        if is_rare:
            self._next = self._seen * RARER
        has_room = len(self._compared) <= FEW + self._seen // SELDOM
        # The loss may be another one in other epochs.
        is_due = is_rare or (self.site.facts.varies_by_epoch and self._epoch != last and has_room)
        if is_due:
            self._compared.append(self._seen)
        return is_due

    def _find_late(self, reason: str | None, found: str | None) -> str | None:
        """What a later comparison found; None if this batch could not be compared."""
        if reason is not None or found is None or found.startswith(UNKNOWN):
            return None
        unseen = self._seen - self._compared[-2] - 1
        before = f"; the {unseen} before it were not compared, and may have changed the training" if unseen else ""
        return f"from optimizer step {self.site.trainer.global_step + 1} on, {found}{before}"

    def _refuse(self, found: str | None, *, is_first: bool) -> None:
        """Leave batches or windows as they are from now on if anything was found: the same decision on all ranks. What
        is found later may have changed the training before."""
        self.refused = self._agree(found)
        if self.refused is not None and not is_first and self._changed:
            self._live.weaken("step.micro_batch", self.refused, "changes-training")

    def stop_merging(self, batch: Any) -> None:
        """Run later windows batch by batch, since training_step skipped a merged one: it may have meant one batch.
        That window stays skipped: its step may have left traces, so it is not repeated."""
        window, trainer = self._read_window(batch), self.site.trainer
        # Several ranks would have to agree, see `_agree`.
        if window is None or len(window.sizes) == 1 or self.refused is not None or trainer.world_size > 1:
            return
        skipped = f"for a merged window, so {len(window.sizes)} of your batches were skipped"
        self.refused = f"from optimizer step {trainer.global_step + 1} on, training_step returned no loss {skipped}"
        self._live.weaken("step.micro_batch", self.refused, "changes-training")
        self._warn_apart(self.refused)

    def note_no_loss(self) -> None:
        """Count a batch that was cut, and then ran whole because training_step returned no loss for a piece."""
        self.uncut, self._changed = self.uncut + 1, self._changed - 1
        self._problem = self._problem or "training_step returned no loss for a micro-batch, so its batch ran whole"

    # -- one of the user's batches, in pieces -----------------------------------------------------------------------

    def _split(self, call: StepCall) -> list[Piece]:
        """Pieces of one of the user's batches, or the batch itself if the pieces would change its gradient."""
        whole = [Piece(call.batch, count_rows(call.batch) or 0, 1.0)]
        if self.refused is not None:
            self._steps, self.uncut = self._steps + 1, self.uncut + 1
            return whole
        pieces = self._cut(call)
        if (len(pieces) > 1 or self.site.trainer.world_size > 1) and self._is_due():
            is_first, self._undecided = self._undecided, False
            found = self._weigh(call, pieces, halves=not is_first)
            self._refuse(found if is_first else self._find_late(None, found), is_first=is_first)
            if self.refused is not None:
                self._problem = self.refused
                self.site.warn(f"{self.rung}: batches are not split: {self.refused}")
                self.uncut, self._changed = self.uncut + 1, 0 if is_first else self._changed - (len(pieces) > 1)
                self._largest = () if is_first else self._largest
                return whole
            if is_first:
                self._warn_unequal_logs()
        if self.weighing is not None and len(pieces) > 1:
            weights = self.weighing.counter.weigh([piece.batch for piece in pieces])
            pieces = [piece._replace(weight=weight) for piece, weight in zip(pieces, weights, strict=True)]
        return pieces

    def _weigh(self, call: StepCall, pieces: Sequence[Piece], *, halves: bool) -> str | None:
        """Find the weights of the pieces; returns why the pieces must not be trained on, or None.

        Args:
            halves: compare the halves of a piece with it, which fits in memory, in place of pieces with the batch.
        """
        reason, mine, batch = None, None, call.batch
        if halves:
            try:
                halved = cut(pieces[0].batch, -(-pieces[0].samples // 2))
            except CannotRegroup:
                halved = []  # another rank may have found something: `gather_first` needs all
            if len(halved) != 1:  # pieces of up to three samples have no halves
                batch, pieces = pieces[0].batch, halved
        if len(pieces) > 1:
            take_loss = self._size.make_take_loss(call.rest)
            with self.site.one_time.span("rehearsal"), giving_back(self.site.device):
                reason, mine = weigh_pieces(self.site.strategy, batch, pieces, take_loss, self._note_unequal)
        self.weighing = gather_first(self.site.trainer, mine) or self.weighing
        return reason

    def _note_unequal(self, name: str) -> None:
        self._unequal[name] = None

    def _warn_unequal_logs(self) -> None:
        if self._unequal:
            names = ", ".join(self._unequal)
            self.site.warn(
                f"{self.rung}: logged values that are not means over samples will differ from now on: {names}"
            )

    # -- a window of them, merged -----------------------------------------------------------------------------------

    def _list_own(self, batch: Any, window: Merged) -> tuple[list[Piece], str | None]:
        """The user's batches of a window, and why they should not be merged. Empty if the merged batch cannot be
        cut into them again, because a hook has changed it."""
        if (apart := self.windows.find_apart(batch)) is not None:
            sized = zip(apart[0], window.sizes, strict=True)
            return [Piece(each, count_rows(each) or size, 1 / window.full) for each, size in sized], apart[1]
        try:
            return cut_at(batch, *window), self.refused
        except CannotRegroup as error:
            return [], str(error)

    def _decide_window(self, call: StepCall, window: Merged) -> tuple[list[Piece], str | None]:
        """Return the user's batches of a window, see `_list_own`, and why they run one by one; None if they are merged.
        Compares gradients if that is due. All ranks must call this: they ask each other."""
        own, reason = self._list_own(call.batch, window)
        no_room = self._check_room(call, window, tries=reason is None)
        reason = reason or no_room
        if no_room is not None or not self._is_due():
            return own, reason
        is_first, self._undecided, found = self._undecided, False, reason
        if reason is None:
            pair = sum(window.sizes[:2])
            # Later, two batches tell enough, and cost a fraction of the window's time.
            few = None if is_first or not self.micro >= pair == 2 * window.sizes[0] else pair
            merged = cut(call.batch, few or self.micro, window, whole_batches=self.groups is not None)
            found = self._compare(call, own[:2] if few else own, merged[:1] if few else merged)
        self._refuse(found if is_first else self._find_late(reason, found), is_first=is_first)
        if is_first and self.refused is None:
            self._warn_unequal_logs()
        return own, self.refused or (None if is_first else reason)

    def _warn_apart(self, why: str) -> None:
        """Warn of the first window that runs batch by batch, and again once all do."""
        if why != self._apart_why and (self.refused or not self._apart_why):
            self._apart_why = why
            self.site.warn(f"{self.rung}: {'windows run' if self.refused else 'a window runs'} batch by batch: {why}")

    def _compare(self, call: StepCall, own: Sequence[Piece], merged: Sequence[Piece]) -> str | None:
        strategy, take_loss = self.site.strategy, self._size.make_take_loss(call.rest)
        with self.site.one_time.span("rehearsal"), giving_back(self.site.device):
            if merged[0].samples >= own[0].samples:
                how = self.groups, self._compares, self._note_unequal
                return explain_difference(strategy, own, merged, take_loss, *how)
            # The search found that the user's own batch does not fit.
            pieces = cut(own[0].batch, self.micro)
            reason, weighing = weigh_pieces(strategy, own[0].batch, pieces, take_loss, self._note_unequal)
            return reason or (weighing and "the loss is a mean over tokens, but a window weights it by samples")

    def _agree(self, reason: str | None) -> str | None:
        """Why windows are not merged in this run: the same decision on all ranks."""
        if not self.site.strategy.reduce_boolean_decision(reason is None, all=True):
            reason = reason or "another rank cannot merge its first window"
        if reason is not None:
            self._check_strict(reason, "batch by batch")
        return reason

    def _check_room(self, call: StepCall, window: Merged, *, tries: bool) -> str | None:
        """Why no rank must merge its window; None if they may. The first step runs without rungs such as amp, and may
        need more memory than all later ones. If nothing waits to start any more, no later window is merged either.

        Args:
            tries: this rank would merge its window. All ranks must call this: they ask each other.
        """
        strategy = self.site.strategy
        held = sorted(self._live.held) if self.site.device.type in LIMITED else []
        if self._size.is_searched or not (held or self._lacked_room):
            return None
        fits = True
        if tries and self.micro > max(window.sizes):
            with self.site.one_time.span("rehearsal"):
                fits = fits_in_memory(strategy, self.micro, self._size.make_trial(call))
        fits = strategy.reduce_boolean_decision(fits, all=True)
        self._lacked_room = not fits and bool(held)
        if fits:
            return None
        if held:
            names = ", ".join(held)
            return f"micro-batches of {self.micro} only fit once these rungs start, after the first step: {names}"
        self.refused = self._agree(f"micro-batches of {self.micro} do not fit in memory")
        return self.refused

    # -- cutting ----------------------------------------------------------------------------------------------------

    def _cut(self, call: StepCall) -> list[Piece]:
        batch, window = call.batch, call.window
        try:
            if window is None:
                self._check_size(batch)
            pieces = cut(batch, self.micro, window, whole_batches=self.groups is not None and window is not None)
        except CannotRegroup as reason:
            self._check_strict(str(reason), "with whole batches")
            self.uncut, self._problem = self.uncut + 1, self._problem or str(reason)
            # A short last window keeps the weight that accumulation would have given it.
            share = 1.0 if window is None else len(window.sizes) / window.full
            rows, sizes = count_rows(batch) or 0, window.sizes if window else ()
            groups = len(sizes) if len(set(sizes)) == 1 and sum(sizes) == rows else 1
            pieces = [Piece(batch, sum(sizes) if window else rows, share, groups)]
        self._steps += 1
        self._changed += len(pieces) > 1 or (window is not None and len(window.sizes) > 1)
        samples = tuple(piece.samples for piece in pieces)
        self._largest = max(self._largest, samples, key=lambda each: (sum(each), len(each)))
        return pieces

    def _check_size(self, batch: Any) -> None:
        """Refuse a batch whose first dimension is not its samples: a list of images [C, H, W] would be cut in C."""
        rows = count_rows(batch)
        if self.whole is None or rows is None:
            return
        last = self.site.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self._misfit or not (rows == self.whole[0] or (last and rows == self.whole[1])):
            self._misfit = True
            raise CannotRegroup(f"the loader's batches have {self.whole[0]} samples, but the first tensor {rows} rows")

    def _check_strict(self, reason: str, otherwise: str) -> None:
        if self._live.strict:
            do = f"turn rungs.{self.rung} off, or turn strict off to train {otherwise}"
            raise FastLoopError(got=f"{self.rung}.micro_batch={self.micro}", why=reason, do=do) from None
