"""A rung that nobody knows: four files and one field of the ladder, in a copy of the package, and all of it works."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.bridge.launch import python
from tests.trainings import NET

ROOT = Path(__file__).resolve().parents[3]

RUNG = '''"""Count the calls of the model's first layer.

Faster because  it is not.
Costs           a hook.
Don't use when  you have no use for the number.
Evidence        calls counted
Source          https://example.org
"""

from __future__ import annotations

from dataclasses import dataclass

from fastloop.errors import NotApplicable
from fastloop.records.card import Card, Tunable
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Site, Verdict

CARD = Card(
    family="compute",
    does="counting calls makes nothing faster",
    answers={"data_wait": 0},
    applies=lambda seen: seen.device == "cpu",
    tunes=Tunable(field="layers", values=lambda _space: (2, 3)),
    owns_trainer_keys={"detect_anomaly": "layers"},
)


@dataclass(frozen=True, kw_only=True)
class Dummy:
    """Counts calls."""

    enabled: bool = False
    layers: int = 1

    def plan(self, facts: Facts) -> Change:
        if facts.device != "cpu":
            raise NotApplicable("only the CPU is counted on")
        action = Action(keys=("model.calls",), when="model", do=self._count)
        return Change(wants={"dummy.layers": self.layers}, actions=(action,), notes=("counts",))

    def _count(self, site: Site) -> Applied:
        calls = []
        hook = next(site.module.children()).register_forward_hook(lambda *_: calls.append(1))
        return Applied(undo=hook.remove, probe=lambda: {"calls": len(calls)})

    def verify(self, seen: Measurement) -> Verdict:
        calls = seen.evidence.get("dummy", {}).get("calls", 0)
        return Verdict(took=calls > 0, why=f"{calls} calls were counted")
'''

TEST = '''"""What the rung does in a real fit, as JSON on stdout."""

import json
import logging
import sys
import warnings

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import fastloop
from fastloop import FastLoop
from fastloop.config.loading import load_callback_config
from fastloop.errors import ConfigError
from fastloop.diagnose import list_findings
from fastloop.experiments.climb.candidates import Position, Start, choose
from fastloop.ladder import Ladder, collect_cards, read_manual
from fastloop.records.climb import Costs
from fastloop.records.measurement import Measurement

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.hooks = []

    def training_step(self, batch, batch_idx):
        self.hooks.append(len(self.net._forward_hooks))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(loop):
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[loop] if loop else [],
    )
    module = Net()
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4))
    return module


def refused(config):
    try:
        from fastloop.config.loading import load

        load(config, overrides=("trainer.detect_anomaly=true",))
    except ConfigError as error:
        return error.why
    return None


def diagnosed(enabled=()):
    """What diagnosis proposes for a loop that waits for its data."""
    loader = {"loader": {"num_workers": 0, "map_style": True, "usable_cpus": 2}}
    parts = {"data_wait": 60.0, "forward": 20.0, "backward": 20.0}
    seen = Measurement(
        device="cpu", steps=50, step_ms={"mean": 100.0, "median": 100.0}, parts_ms=parts, host_ms=parts, evidence=loader
    )
    return list_findings(seen, collect_cards(), enabled)[0].patch


def climbed():
    """What a climb tries next where the ladder's other rungs are on, and why it ends once this one is on too."""
    others = frozenset(name for name, _ in Ladder().rungs() if name != "dummy")
    costs = Costs(now_ms=100.0, replayed_ms=80.0, resident_ms=80.0, mfu=0.01)
    tried = choose(Position(start=Start(enabled=others), costs=costs, stack={}))
    ended = choose(Position(start=Start(enabled=others | {"dummy"}), costs=costs, stack={}))
    return [tried.rung, tried.patches[0], tried.tunes, ended]


loop = FastLoop(sys.argv[1], out=sys.argv[2], quiet=True)
ours, plain = fit(loop), fit(None)
(step,) = loop.plan.steps
found = {
    "package": fastloop.__file__,
    "family": collect_cards()["dummy"].family,
    "manual": read_manual("dummy").splitlines()[0],
    "plan": [step.rung, step.status, dict(step.change.wants), list(step.change.notes)],
    "hooks": [ours.hooks, plain.hooks, len(ours.net._forward_hooks)],
    "same": torch.equal(ours.net.weight, plain.net.weight),
    "evidence": loop.measurement.evidence["dummy"],
    "verdict": [loop.verdicts[0].rung, loop.verdicts[0].took, loop.verdicts[0].why, loop.verdicts[0].parity_class],
    "refused": refused(sys.argv[1]),
    "diagnosed": [diagnosed(), diagnosed(("dummy",))],
    "climbed": climbed(),
}
print(json.dumps(found))
'''


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and what it ships, with one more rung."""
    copy = tmp_path_factory.mktemp("house")
    for name in ("fastloop", "configs", "recipes"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in {
        "fastloop/rungs/dummy.py": RUNG,
        "configs/rungs/dummy.yaml": "rungs:\n  dummy: {enabled: true}\n",
        "tests/rungs/test_dummy.py": TEST,
        "README.md": "| `dummy` | counts calls |\n",
    }.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text(text)
    ladder = copy / "fastloop" / "ladder.py"
    above = "    overlap: Overlap = Overlap()\n"
    text = ladder.read_text().replace(above, f"{above}    dummy: Dummy = Dummy()\n")
    ladder.write_text(
        text.replace("from fastloop.rungs.fused", "from fastloop.rungs.dummy import Dummy\nfrom fastloop.rungs.fused")
    )
    return copy


@pytest.fixture(scope="module")
def found(house: Path) -> dict[str, Any]:
    """What a fit with it shows."""
    script = house / "tests" / "rungs" / "test_dummy.py"
    return json.loads(
        python(script, "dummy", str(house / "run"), cwd=house, env={"PYTHONPATH": str(house)}).splitlines()[-1]
    )  # type: ignore[no-any-return]


def test_it_is_planned_applied_verified_and_undone(house: Path, found: dict[str, Any]) -> None:
    assert Path(found["package"]).is_relative_to(house)
    assert found["manual"] == "Count the calls of the model's first layer." and found["family"] == "compute"
    assert found["plan"] == ["dummy", "planned", {"dummy.layers": 1}, ["counts"]]
    assert found["hooks"] == [[1, 1, 1], [0, 0, 0], 0] and found["same"]
    assert found["evidence"] == {"calls": 3}
    assert found["verdict"] == ["dummy", True, "3 calls were counted", "exact"]


def test_its_card_refuses_a_key_of_the_trainer(found: dict[str, Any]) -> None:
    assert found["refused"] == "rungs.dummy is enabled and sets it"


def test_the_files_of_a_run_name_it(house: Path, found: dict[str, Any]) -> None:
    plan = json.loads((house / "run" / "plan.json").read_text())["rungs"]
    assert [(rung["rung"], rung["wants"], rung["actions"]) for rung in plan] == [
        ("dummy", {"dummy.layers": 1}, ["model.calls"])
    ]
    evidence = json.loads((house / "run" / "measurement.json").read_text())["evidence"]
    assert evidence["dummy"] == found["evidence"]
    assert "3 calls were counted" in (house / "run" / "report.md").read_text()


def test_diagnosis_proposes_it_and_a_climb_tries_it(found: dict[str, Any]) -> None:
    on = {"rungs": {"dummy": {"enabled": True}}}
    assert found["diagnosed"][0] == on and found["diagnosed"][1] != on
    rung, patch, tunes, ended = found["climbed"]
    assert (rung, patch, tunes) == ("dummy", on, "dummy")
    assert ended.startswith("nothing to gain: no remaining rung"), "the control: it was the last one"


@pytest.mark.slow
def test_its_number_is_tuned_by_real_trainings(house: Path) -> None:
    settings = ("--out", "tuned", "--json", "tuned.json", "run.max_steps=40", "watch.warmup_steps=2")
    python("-m", "fastloop", "tune", str(NET), "dummy", *settings, cwd=house, env={"PYTHONPATH": str(house)})
    content = json.loads((house / "tuned.json").read_text())
    assert content["key"] == "rungs.dummy.layers" and content["as_it_is"] == 0
    assert {point["value"] for point in content["points"]} == {0, 2, 3} and all(
        point["ok"] for point in content["points"]
    )
    said = [json.loads((house / "tuned" / f"dummy-{value}" / "verdicts.json").read_text()) for value in (2, 3)]
    assert all(each["verdicts"][0]["took"] for each in said), "it took in the trainings of its values"
