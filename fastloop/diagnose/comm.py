"""Several ranks: the exchange of gradients that nothing hides, and the rank all others wait for."""

from __future__ import annotations

from fastloop.diagnose.naming import named, per_step
from fastloop.diagnose.reading import step_ms
from fastloop.diagnose.remedies import Remedy, choose
from fastloop.diagnose.split import exchange_ms, skew_ms
from fastloop.diagnose.straggler import straggler as slow_rank
from fastloop.measurement import Measurement
from fastloop.records import Finding

SAYS = {"trials": "measured by trials with and without it", "trace": "traced", "marks": "by its marks"}


def comm_exposed(seen: Measurement, enabled: tuple[str, ...]) -> Finding | None:
    """What the exchange costs the step, as trials, a trace or the parts have it.

    The gain is an estimate in any case: the trials have other steps than the run as it is, in which the exchange may
    cost less, hidden behind the wait for data.
    """
    exchange = exchange_ms(seen)
    if exchange is None:
        return None
    spent, source = exchange
    spent = max(0.0, spent - skew_ms(seen, source))  # which the straggler is named for
    facts = f"the exchange of gradients costs {per_step(seen, spent)} ({SAYS[source]})"
    instead = ("try rungs.overlap.comm_hook: bf16, which wins on slow links and loses on fast ones, or exchange less"
               " often (accumulate_grad_batches, which changes the training)")  # fmt: skip
    return named(seen, "comm_exposed", spent, facts, choose(seen, enabled, ("overlap",), instead))


def straggler(seen: Measurement, _enabled: tuple[str, ...]) -> Finding | None:
    """One rank's own work takes longer than the others'."""
    slow, step = slow_rank(seen), step_ms(seen)
    if slow is None or step is None:
        return None
    facts = (f"{len(seen.ranks) - 1} of {len(seen.ranks)} ranks wait for rank {slow.rank} on {slow.host} for"
             f" {per_step(seen, slow.excess_ms)}: its {slow.part} takes {slow.part_ms:.1f} ms, theirs"
             f" {slow.others_part_ms:.1f}")  # fmt: skip
    advice = f"no rung helps: look at that machine and at what rank {slow.rank} does in {slow.part}"
    return named(seen, "straggler", slow.excess_ms, facts, Remedy(None, advice))
