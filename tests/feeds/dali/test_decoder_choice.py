"""The decoder is chosen by the training's own batches: what makes them faster stays."""

from __future__ import annotations

import pytest

from fastloop.feeds.dali.decoder_choice import SETTLING, TIMED, DecoderChoice


def follow(choice: DecoderChoice, took_s: dict[str, float], waited_s: dict[str, float], batches: int) -> list[str]:
    """The decoder of each batch, if its batches take this long by decoder."""
    now, used = choice.first, []
    for _ in range(batches):
        used.append(now)
        now = choice.note(took_s[now], waited_s[now]) or now
    return used


ROUND = SETTLING + TIMED


@pytest.mark.parametrize(
    ("took", "waited", "used", "why"),
    [
        ({"cpu": 0.05, "mixed": 0.04}, {"cpu": 0.004, "mixed": 0.0}, ["cpu"] * 3, "waits for pictures for 8% of a"),
        (
            {"cpu": 0.05, "mixed": 0.04},
            {"cpu": 0.01, "mixed": 0.0},
            ["cpu", "mixed", "mixed"],
            "a batch takes 40.0 ms if the GPU decodes, 50.0 if the CPU",
        ),
        (
            {"cpu": 0.05, "mixed": 0.049},
            {"cpu": 0.01, "mixed": 0.02},
            ["cpu", "mixed", "cpu"],
            "a batch takes 49.0 ms if the GPU decodes, 50.0 if the CPU",
        ),
    ],
)
def test_the_faster_one_stays(took: dict[str, float], waited: dict[str, float], used: list[str], why: str) -> None:
    choice = DecoderChoice("cpu", "mixed")
    assert follow(choice, took, waited, 3 * ROUND) == [each for each in used for _ in range(ROUND)]
    assert choice.is_over and choice.now == used[-1]
    seen = choice.evidence()
    assert why in seen["decode_why"] and set(seen["decode_ms"]) == set(used)


def test_long_single_batches_decide_nothing() -> None:
    """A compile, a validation, a checkpoint."""
    choice = DecoderChoice("mixed", "cpu")
    for number in range(2 * ROUND):
        choice.note(*((30.0, 20.0) if number % 5 == 0 else (0.05, 0.0)))
    assert choice.is_over and choice.now == "mixed" and choice.evidence()["decode_ms"] == {"mixed": 50.0}


def test_one_that_does_not_work_is_not_tried_again() -> None:
    choice = DecoderChoice("cpu", "mixed")
    follow(choice, {"cpu": 0.05, "mixed": 0.05}, {"cpu": 0.02, "mixed": 0.0}, ROUND)
    assert choice.now == "mixed"
    choice.refuse("no GPU decoder")
    assert choice.now == "cpu" and choice.evidence()["decode_why"] == "no GPU decoder"
    assert follow(choice, {"cpu": 0.05}, {"cpu": 0.02}, 3 * ROUND) == ["cpu"] * 3 * ROUND
