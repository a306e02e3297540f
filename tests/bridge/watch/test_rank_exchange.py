"""Every rank's record on rank 0: who comes, who does not, and that nobody waits for the others but rank 0."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from fastloop.bridge.watch import rank_exchange
from fastloop.bridge.watch.rank_exchange import Ranks, find_default_store, name_cause, record_of_rank
from fastloop.records.measurement import Measurement
from tests.bridge.launch import python

PROGRAM = Path(__file__).with_name("gather_ranks.py")
LIMIT_S = 1.5
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0")


def trainer(rank: int, world_size: int = 2) -> Any:
    return SimpleNamespace(global_rank=rank, world_size=world_size)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One store for all ranks, which are then objects of one process."""
    made = torch.distributed.HashStore()
    monkeypatch.setattr(rank_exchange, "find_default_store", lambda: made)
    return made


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


# -- the exchange -----------------------------------------------------------------------------------------------------


def test_all_records_come_in_order_with_rank_and_host(store: Any) -> None:
    made = [Ranks(trainer(rank, 3)) for rank in range(3)]
    for rank in (2, 1):
        assert made[rank].gather({"step_ms": 10.0 + rank, "parts_ms": MappingProxyType({"h2d": None})}) == ()
    found = made[0].gather({"step_ms": 10.0, "parts_ms": {}})
    assert [(record["rank"], record["step_ms"]) for record in found] == [(0, 10.0), (1, 11.0), (2, 12.0)]
    assert found[1]["parts_ms"] == {"h2d": None} and all(record["host"] for record in found)
    assert made[0].missing == () and made[0].why is None


GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:73"


@pytest.mark.parametrize(
    ("deaths", "cause"),
    [
        ([GLOO, "ValueError: bad data"], "rank 1: ValueError: bad data"),
        ([GLOO, "RuntimeError: Application timeout caused pair closure", "KeyError: 3"], "rank 2: KeyError: 3"),
        (["DistBackendError: NCCL error: remote process exited", "IndexError"], "rank 1: IndexError"),
        ([GLOO, GLOO], GLOO),
        ([GLOO, None], GLOO),
        (["KeyError: 3", "ValueError: bad data"], "KeyError: 3"),
        ([None, "ValueError: bad data"], None),
    ],
)
def test_the_cause_is_the_error_of_a_rank_that_did_not_just_lose_the_others(
    deaths: list[str | None], cause: str | None
) -> None:
    records = [{"rank": rank, "died_of": death} for rank, death in enumerate(deaths)]
    assert name_cause(deaths[0], records) == cause
    assert name_cause(deaths[0], ()) == deaths[0], "nobody else was heard of"


def test_rank_0_waits_for_one_that_is_late(store: Any) -> None:
    first, second = Ranks(trainer(0)), Ranks(trainer(1))
    late = threading.Timer(0.3, second.gather, [{"step_ms": 11.0}])
    late.start()
    assert [record["rank"] for record in first.gather({}, limit_s=20)] == [0, 1]
    late.join()


def test_a_missing_rank_is_named_and_not_waited_for_beyond_the_limit(store: Any) -> None:
    first, _, third = (Ranks(trainer(rank, 3)) for rank in range(3))
    third.gather({})
    began = time.monotonic()
    assert [record["rank"] for record in first.gather({}, limit_s=0.2)] == [0, 2]
    assert 0.2 <= time.monotonic() - began < 50
    assert first.missing == (1,) and first.why == "nothing arrived within 0.2 s from rank 1"


def test_a_record_too_late_for_one_fit_is_not_the_next_ones(store: Any) -> None:
    first, second = Ranks(trainer(0)), Ranks(trainer(1))
    assert len(first.gather({}, limit_s=0)) == 1 and first.missing == (1,)
    second.gather({"fit": 1})
    assert store.check(["fastloop/fit/1/1"]), "it did come, too late"
    again, second = Ranks(trainer(0)), Ranks(trainer(1))
    assert len(again.gather({}, limit_s=0)) == 1, "that one is not read here"
    again, second = Ranks(trainer(0)), Ranks(trainer(1))
    second.gather({"fit": 3})
    assert again.gather({}, limit_s=0)[1]["fit"] == 3


def test_asked_again_it_neither_waits_nor_exchanges_again(store: Any) -> None:
    first, second = Ranks(trainer(0)), Ranks(trainer(1))
    second.gather({"step_ms": 1.0})
    found = first.gather({}, limit_s=0)
    assert not store.check(["fastloop/fit/1/1"]), "read means deleted"
    assert first.gather({"step_ms": 2.0}, limit_s=60) is found and len(found) == 2


def test_what_is_no_json_travels_as_text_and_what_is_damaged_is_missing(store: Any) -> None:
    first, second, _ = (Ranks(trainer(rank, 3)) for rank in range(3))
    second.gather({"device": torch.device("cpu")})
    store.set("fastloop/fit/1/2", "{half a rec")
    found = first.gather({"device": torch.device("cpu")}, limit_s=0)
    assert [record["device"] for record in found] == ["cpu", "cpu"]
    assert first.missing == (2,) and first.why == "the record of rank 2 cannot be read"


class Without:
    """A store that lacks a method, or fails in it."""

    def __init__(self, store: Any, name: str, error: Exception | None = None) -> None:
        self.store, self.name, self.error, self.failed = store, name, error, 0

    def __getattr__(self, name: str) -> Any:
        if name != self.name:
            return getattr(self.store, name)
        if self.error is None:
            raise AttributeError(name)
        return self._fail

    def _fail(self, *args: Any) -> None:
        self.failed += 1
        raise self.error  # type: ignore[misc]


def test_a_store_that_fails_hurts_nobody(store: Any) -> None:
    gone = ConnectionError("Connection reset by peer")
    first, second = Ranks(trainer(0)), Ranks(trainer(1))
    first._store = broken = Without(first._store, "check", gone)
    second._store = Without(second._store, "set", gone)
    assert second.gather({}) == () and "could not be sent" in str(second.why)
    assert [record["rank"] for record in first.gather({}, limit_s=60)] == [0]
    assert broken.failed == 1 and first.missing == (1,) and "Connection reset" in str(first.why)


def test_alone_or_without_a_store_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Ranks(trainer(0, 1))
    assert (alone.gather({}, limit_s=60), alone.missing, alone.why) == ((), (), None)
    with pytest.raises(RuntimeError, match="no process group"):
        find_default_store()
    none = Ranks(trainer(0, 2))
    assert none.gather({}, limit_s=60) == () and none.missing == () and "no process group" in str(none.why)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_get_default_store")
    assert "AttributeError" in str(Ranks(trainer(0, 2)).why), "a torch without the private function"


# -- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def groups() -> Iterator[Path]:
    """What two ranks found in every case of the program, which runs once."""
    with tempfile.TemporaryDirectory() as folder:
        python(PROGRAM, "bare", cwd=Path(folder), limit_s=250)
        yield Path(folder)


@pytest.mark.multirank
@pytest.mark.parametrize("fit", ["first", "second"])
def test_two_ranks_both_arrive(groups: Path, fit: str) -> None:
    seen = read(groups, f"both-{fit}-0")
    assert [(record["rank"], record["step_ms"], record["fit"]) for record in seen["records"]] == [
        (0, 10.0, fit),
        (1, 11.0, fit),
    ]
    assert seen["missing"] == [] and seen["records"][1]["parts_ms"] == {"data_wait": None}
    other = read(groups, f"both-{fit}-1")
    assert other["records"] == [] and other["took_s"] < 50, "no other rank waits"
    assert read(groups, "codes")["both"] == [0, 0]


@pytest.mark.multirank
@pytest.mark.parametrize("fault", ["sleeps", "dies"])
def test_a_stuck_or_dead_rank_does_not_hold_rank_0(groups: Path, fault: str) -> None:
    assert (groups / f"{fault}-fault.json").is_file(), "the fault did not happen"
    seen = read(groups, f"{fault}-0")
    assert [record["rank"] for record in seen["records"]] == [0] and seen["missing"] == [1]
    assert LIMIT_S <= seen["took_s"] < LIMIT_S + 20 and "rank 1" in seen["why"]
    assert read(groups, "codes")[fault] == [0, 0 if fault == "sleeps" else 7]
    if fault == "sleeps":  # rank 0, and its store with it, had left by then
        late = read(groups, "sleeps-1")
        assert late["records"] == [] and late["took_s"] < 50, "it may wait a minute, and must not"


@pytest.mark.multirank
def test_the_record_of_a_rank_that_left_is_there(groups: Path) -> None:
    seen = read(groups, "leaves-0")
    assert [record["step_ms"] for record in seen["records"]] == [10.0, 11.0] and seen["missing"] == []
    assert read(groups, "codes")["leaves"] == [0, 7]


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("launcher", "way", "fits", "environment"),
    [
        ((), "ddp", 2, "LightningEnvironment"),
        (TORCHRUN, "ddp", 2, "TorchElasticEnvironment"),
        ((), "ddp_spawn", 1, "LightningEnvironment"),
        ((), "slurm", 2, "SLURMEnvironment"),
    ],
    ids=["ddp", "torchrun", "ddp_spawn", "slurm"],
)
def test_every_launcher_gathers_on_global_rank_0(
    launcher: tuple[str, ...], way: str, fits: int, environment: str, tmp_path: Path
) -> None:
    python(*launcher, PROGRAM, way, cwd=tmp_path)
    for fit in range(1, fits + 1):
        seen, other = read(tmp_path, f"fit{fit}-0"), read(tmp_path, f"fit{fit}-1")
        assert [(record["rank"], record["steps"], record["fit"]) for record in seen["records"]] == [
            (0, 2 * fit, fit),
            (1, 2 * fit, fit),
        ], seen
        assert (seen["missing"], seen["why"], seen["environment"]) == ([], None, environment) and seen["took_s"] < 50
        assert other["records"] == [] and other["why"] is None and other["took_s"] < 50


def test_a_rank_hands_in_how_its_fit_ended() -> None:
    seen = Measurement(step_ms={"mean": 4.0}, evidence={"garbage_collection": {"ms_per_step": 0.5}}, steps=7)
    well, badly = record_of_rank(seen), record_of_rank(dataclasses.replace(seen, partial=True), KeyError("x"))
    assert (well["partial"], well["ended_by"], well["garbage_ms"], well["steps"]) == (False, None, 0.5, 7)
    assert (badly["partial"], badly["ended_by"], badly["step_ms"]) == (True, "KeyError", {"mean": 4.0})
