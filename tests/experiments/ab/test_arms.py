"""An arm that is a configuration: what is asked of a run reaches the trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastloop.experiments.ab import arms
from fastloop.experiments.ab.arms import Ask, ConfigArm
from fastloop.experiments.trials.trial import Job
from fastloop.records.store import decode, dump


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Job, Path]]:
    found: list[tuple[str, Job, Path]] = []
    monkeypatch.setattr(arms, "run_trial", lambda label, job, folder, **_: found.append((label, job, folder)))
    return found


def test_seeds_count_from_the_arms_own(asked: list[Any], tmp_path: Path) -> None:
    arm = ConfigArm(name="amp", job=Job(conf="cifar10", overrides=("run.seed=40", "rungs.amp.enabled=true")))
    arm.run("third", tmp_path, Ask(seed=2, steps=9, warmup=3, ledger=True))
    ((label, job, folder),) = asked
    config = job.config()
    assert (label, folder, job.ledger) == ("third", tmp_path, True)
    assert (config.run.seed, config.run.max_steps, config.watch.warmup_steps) == (42, 9, 3)
    assert config.ladder.enabled() == ("amp",) and arm.plans_alone


def test_counts_reach_the_loader_trial(asked: list[Any], tmp_path: Path) -> None:
    arm = ConfigArm(name="base", job=Job(conf="cifar10"))
    arm.run("loaders", tmp_path, Ask(variation="loader", counts=(1, 4), enough_ms=20.0))
    job = asked[0][1]
    assert (job.variation, job.counts, job.enough_ms) == ("loader", (1, 4), 20.0)
    assert decode(json.loads(dump(job)), Job) == job, "as the child reads it"


def test_what_is_not_asked_for_stays_as_the_arm_has_it(asked: list[Any], tmp_path: Path) -> None:
    arm = ConfigArm(name="base", job=Job(conf="cifar10", overrides=("run.max_steps=77",)))
    arm.run("gradient", tmp_path, Ask(variation="gradients", reference=tmp_path / "ref"))
    job = asked[0][1]
    assert job.config().run.max_steps == 77 and job.config().watch.warmup_steps == 20
    assert (job.variation, job.reference, job.ledger) == ("gradients", tmp_path / "ref", False)
    assert decode(json.loads(dump(job)), Job) == job, "as the child reads it"
