"""Compute cross-entropy over a large vocabulary in two kernels, also in compiled graphs, and pad its rows there.

Faster because  logits are read and their gradient is written once each, without float32 copies; inside a compiled
                graph, rows that are aligned in memory make the output layer's matrix products faster.
Costs           a second or two to compile both kernels once; inside a compiled graph, memory for the gradient beside
                the logits; rounding.
Don't use when  there are few classes, or the loss has class weights or label smoothing (such calls run unchanged).
Evidence        large-vocabulary calls that used the kernels, and the first one's deviation; losses in compiled graphs
Source          https://arxiv.org/abs/2410.10989 (Liger Kernel)
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.errors import NotApplicable, require_positive
from fastloop.records.card import DEVICE, Card, Settings
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Site, Verdict
from fastloop.records.readings import compiles, on_gpu, to_number


def _has_many_classes(seen: Measurement) -> bool:
    return on_gpu(seen) and bool(to_number((seen.evidence.get("model") or {}).get("classes")))


def _pad_vocabulary(seen: Measurement) -> tuple[Settings, str] | None:
    """Padding needs a compiled graph."""
    if not _has_many_classes(seen) or not compiles(seen):
        return None
    return {"enabled": True}, "inside compiled modules it pads a large vocabulary; parameters stay as they are"


CARD = Card(
    family="compute",
    does="the loss over a large vocabulary reads the logits once and writes them once",
    answers={"memory_bound": 3, "elementwise": 2, "misaligned_matmuls": 2, DEVICE: 5},
    remedies={"misaligned_matmuls": _pad_vocabulary},
    follows={"fp32_math": 4, "compute_bound": 2},
    applies=_has_many_classes,
    plan_shows_refusal=True,
)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """torch.nn.functional.cross_entropy, for calls with 8,192 classes or more; parameters and shapes do not change."""

    enabled: bool = False
    pad_vocabulary: Literal["auto"] | bool = "auto"
    """Pad the classes to a multiple of 64, without changing parameters or checkpoints. auto = in compiled graphs that
    contain the output layer and its loss; true = for losses outside such graphs, also pad the rows of the logits'
    gradient in memory."""
    chunks: int = 1
    """Number of pieces to split the tokens into. A later version will support more than one."""

    def __post_init__(self) -> None:
        require_positive("loss.chunks", self.chunks, why="a loss has at least one piece", do="write 1")

    def plan(self, facts: Facts) -> Change:
        """Request our loss in place of PyTorch's, if the model may have a large vocabulary."""
        if self.chunks > 1:
            raise NotApplicable(
                "chunks: your module computes the logits before it calls the loss, so splitting saves nothing. In your"
                " own code, use Liger's fused linear cross-entropy"
            )
        if not facts.classes:
            raise NotApplicable("no layer has 8,192 outputs or more")
        if facts.device == "cuda" and facts.compiler is None:
            raise NotApplicable("Triton needs a C compiler, and none was found: install gcc or g++")
        by_ladder = "loss" in facts.by_ladder  # then compiling the kernels, which takes seconds, might not pay back
        action = Action(keys=("model.loss",), when="model", do=self._change_graphs if by_ladder else self._replace)
        return Change(parity="approximate", evaluation=True, actions=(action,))

    def _change_graphs(self, site: Site) -> Applied:
        return self._replace(site, outside=False)

    def _replace(self, site: Site, *, outside: bool = True) -> Applied:
        from fastloop.feeds.loss.cross_entropy import LargeCrossEntropy
        from fastloop.feeds.loss.graph_kernels import UseKernels
        from fastloop.feeds.loss.padding import PadVocabulary

        loss = LargeCrossEntropy(pads=self.pad_vocabulary is True)
        pad, use, passes, undo = PadVocabulary(), UseKernels(), site.graph_passes, contextlib.ExitStack()
        if outside:
            undo.enter_context(loss.put_in())
        ours: list[Any] = [pad, use] if self.pad_vocabulary else [use]
        passes += ours

        def remove_passes() -> None:
            passes[:] = [each for each in passes if each not in ours]

        undo.callback(remove_passes)

        def probe() -> Mapping[str, Any]:
            names = ("calls", "classes", "row", "deviation", "failure", "passed")
            return {**{name: getattr(loss, name) for name in names}, "padded": pad.padded, "in_graphs": use.used}

        return Applied(undo=undo.close, probe=probe)

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if calls with many classes used our loss, or compiled graphs were changed."""
        evidence = seen.evidence.get("loss", {})
        if "calls" not in evidence:
            return Verdict(took=None, why="no step ran")
        if evidence["failure"]:
            return Verdict(took=False, why=f"PyTorch's own cross_entropy runs: {evidence['failure']}")
        padded, inside = evidence["padded"], evidence["in_graphs"]
        if not evidence["calls"] and not padded and not inside:
            outside = "none was called through torch.nn.functional outside compiled modules"
            why_not = evidence["passed"] or f"{outside}, and none inside them qualifies"
            return Verdict(took=False, why=f"no cross_entropy over a large vocabulary ran: {why_not}")
        why = [f"{padded} losses padded in compiled graphs"] if padded else []
        why += [f"{inside} losses in compiled graphs read and write the logits once each"] if inside else []
        if calls := evidence["calls"]:
            classes, row = evidence["classes"], evidence["row"]
            apart = f", their gradient in rows of {row:,}" if row > classes else ""
            why.append(f"{calls} losses over {classes:,} classes read and wrote the logits once each{apart}")
            if evidence["deviation"] is not None:
                why.append(f"the first deviated by {evidence['deviation']:.1g}")
        return Verdict(took=True, why="; ".join(why))
