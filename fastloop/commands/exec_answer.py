"""The answer of fastloop exec, once its command has ended: what was measured, or why nothing was."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fastloop import diagnose
from fastloop.bridge.fail_open import is_disabled
from fastloop.commands.console import Answer
from fastloop.commands.rerun import name_command, to_prove
from fastloop.experiments.ab.script_arms import runs_under_this_python
from fastloop.experiments.trials.script_injection import explain_unmeasured, list_notes, name_file
from fastloop.ladder import collect_cards
from fastloop.records import store
from fastloop.records.run_files import PlanFile, load_run
from fastloop.records.trial import ScriptEvent
from fastloop.report.run import summary


def answer(
    name: str, where: Path, code: int, events: Sequence[ScriptEvent], command: Sequence[str], config: str | None
) -> Answer:
    record = load_run(where)
    content = {**store.to_json(record), "exit_code": code, "notes": list_notes(events)}
    if record.measurement is None:
        why = "FASTLOOP_DISABLE is set" if is_disabled() else explain_unmeasured(name_file(command), events, code)
        if code and not any(event.event == "constructed" for event in events):
            why += _name_other_python(command)
        if config and any(event.event == "yielded" for event in events):
            why += "; the rungs of this command were not used"
        said = f"nothing was measured: {why}"
        content |= {"run_dir": None, "notes": [said, *list_notes(events)]}
        return Answer(text=f"fastloop: {said}", json=content, exit_code=code)
    seen, plan = record.measurement, (record.plan or PlanFile()).to_plan()
    found, verdicts = record.findings or (), record.verdicts or ()
    then, later = diagnose.list_next_steps(found, seen, collect_cards(), tuple(step.rung for step in plan.steps))
    report, proof = store.report_in(where), to_prove(found, name_command(command, config))
    lines = summary.write_lines(seen, plan, verdicts, found, report, name, then, later, proof)
    lines += [f"NOTE     {note}" for note in list_notes(events)]
    return Answer(text="\n".join(lines), json=content, exit_code=code)


def _name_other_python(command: Sequence[str]) -> str:
    """Name the command's Python if it is not the one that fastloop is installed for; else return an empty string."""
    found = shutil.which(command[0]) or ""
    if not Path(found).name.startswith("python") or runs_under_this_python(command):
        return ""
    return f"; it ran with {found}, but fastloop is installed for {sys.executable}"
