"""Remedies for a finding: rungs that are off, apply to the measured run, and do what the code does not do already.

A rung that is on is never proposed. If it is enabled but inactive, the finding says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastloop.records.card import DEVICE, Cards, Settings
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding, Verdict

NO_RUNG = "no rung helps with this"
"""Applies to one finding: another may propose a rung."""
BEFORE_THE_DEVICE = ("data_wait", "h2d", "callbacks_logging", "sync", "host_other")


class Remedy(NamedTuple):
    """A patch (or None) and its text."""

    patch: Mapping[str, Any] | None
    says: str


@dataclass(frozen=True, kw_only=True)
class Rungs:
    """All rungs, by their cards, and which of them are on."""

    cards: Cards
    enabled: tuple[str, ...] = ()
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    """Verdicts by rung; a rung without a verdict counts as in effect."""

    def choose(self, seen: Measurement, cause: str, instead: str, *, together: bool = False) -> Remedy:
        """Choose the first rung against this cause that is off and applies, or all of them with `together`.

        If there is none, the text says what to do: advice from a rung's card, or else `instead`.
        """
        rungs = self.list_against(cause)
        free = [(rung, remedy) for rung in rungs if (remedy := self._find_remedy(seen, rung, cause)) is not None]
        if chosen := free if together else free[:1]:
            patch = {"rungs": {rung: fields for rung, (fields, _) in chosen}}
            return Remedy(patch, "; ".join(says for _, (_, says) in chosen))
        on = [rung for rung in rungs if rung in self.enabled]
        idle = self._explain_idle(on)
        helps = NO_RUNG.replace("no rung", "no further rung") if on and not idle else NO_RUNG
        return Remedy(None, f"{helps}: {'; '.join([*idle, self.advise(seen, cause) or instead])}")

    def _find_remedy(self, seen: Measurement, rung: str, cause: str) -> tuple[Settings, str] | None:
        """Return the fields of a rung's patch against this cause, and what it does; None if it cannot help."""
        card = self.cards[rung]
        if (special := card.remedies.get(cause)) is not None:
            return None if rung in self.enabled else special(seen)
        if not self.is_available(seen, rung):
            return None
        return card.patch(seen), card.does if isinstance(card.does, str) else card.does(seen)

    def _explain_idle(self, rungs: Sequence[str]) -> list[str]:
        """Name the enabled rungs among these that had no effect, and those whose effect is unknown. Give the reason
        only for a single rung; verdicts.json has the others."""
        texts = []
        for took, state in ((False, "enabled but inactive"), (None, "on, but whether it had an effect is unknown")):
            found = [known for rung in rungs if (known := self.verdicts.get(rung)) is not None and known.took is took]
            if len(found) == 1:
                texts.append(f"{found[0].rung} is {state} ({found[0].why})")
            elif found:
                names = " and ".join((", ".join(each.rung for each in found[:-1]), found[-1].rung))
                texts.append(f"{names} are {state.replace('it had', 'they had')}")
        return texts

    def explain_refused(self, seen: Measurement, cause: str) -> str | None:
        """Return why the first rung against this cause does not apply to the run's loader; None if it does."""
        refused = seen.evidence.get("refused") or {}
        first = next((rung for rung in self.list_against(cause) if rung not in self.enabled), None)
        return f"{first} does not apply ({refused[first]})" if first is not None and first in refused else None

    def advise(self, seen: Measurement, cause: str) -> str | None:
        """Return advice from a rung's card about this cause, for when no rung helps."""
        for rung, card in self.cards.items():
            advice = card.advice.get(cause)
            if text := advice(seen, rung in self.enabled) if callable(advice) else advice:
                return text
        return None

    def find_tuned_key(self, cause: str) -> str | None:
        """Return the full key of the number that an enabled rung against this cause has: ``rungs.workers.count``."""
        numbers = ((rung, self.cards[rung].tunes) for rung in self.list_against(cause) if rung in self.enabled)
        return next((f"rungs.{rung}.{number.field}" for rung, number in numbers if number is not None), None)

    def has_left_out(self, cause: str) -> bool:
        """Whether an enabled rung against this cause that has a number, such as that of workers, was not worth it."""
        tuned = (rung for rung in self.list_against(cause) if rung in self.enabled and self.cards[rung].tunes)
        verdicts = (self.verdicts.get(rung) for rung in tuned)
        return any(verdict is not None and verdict.took is False for verdict in verdicts)

    def list_against(self, cause: str) -> list[str]:
        """Return the rungs that address a cause, in the order to try them."""
        places = {rung: card.answers[cause] for rung, card in self.cards.items() if cause in card.answers}
        return sorted(places, key=places.__getitem__)

    def are_in_effect(self, cause: str) -> bool:
        """Whether an enabled rung against this cause is known to have had an effect."""
        verdicts = (self.verdicts.get(rung) for rung in self.list_against(cause) if rung in self.enabled)
        return any(verdict is not None and bool(verdict.took) for verdict in verdicts)

    def list_after(self, cause: str) -> list[str]:
        """Return the rungs worth trying once one against this cause is on, in the order to try them."""
        places = {rung: {**card.answers, **card.follows} for rung, card in self.cards.items()}
        return sorted((rung for rung in places if cause in places[rung]), key=lambda rung: places[rung][cause])

    def is_available(self, seen: Measurement, rung: str) -> bool:
        """Whether a rung is off, may apply and pay off in this run, and is not already in the script.

        ``evidence["refused"]`` lists the rungs whose plan refuses the run's loader.
        """
        refused = seen.evidence.get("refused") or {}
        return rung not in self.enabled and rung not in refused and self.cards[rung].applies(seen)


def list_next_steps(
    findings: tuple[Finding, ...], seen: Measurement, cards: Cards, enabled: tuple[str, ...] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return rungs to try after the patches, and rungs to try once the device is the limit.

    All of them are off, may apply, and are not in the patches. Both are empty if no patch is proposed.
    """
    patches = {finding.bottleneck: finding.patch.get("rungs", {}) for finding in findings if finding.patch}
    if not any(patches.values()):
        return (), ()
    rungs, known = Rungs(cards=cards, enabled=enabled), {rung for patch in patches.values() for rung in patch}
    replaced = any(cards[rung].replaces_loader(seen) for rung in patches.get("data_wait", ()))
    known |= {rung for rung, card in cards.items() if replaced and card.family == "feed"}
    after = dict.fromkeys(rung for cause in patches for rung in rungs.list_after(cause))
    then = tuple(rung for rung in after if rung not in known and rungs.is_available(seen, rung))
    if seen.device != "cuda" or findings[0].bottleneck not in BEFORE_THE_DEVICE:
        return then, ()
    known.update(then)
    return then, tuple(
        rung for rung in rungs.list_against(DEVICE) if rung not in known and rungs.is_available(seen, rung)
    )
