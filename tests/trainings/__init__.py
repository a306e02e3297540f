"""Trainings as strangers write them, for tests that start processes: recipes of one's own, and scripts."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

NET = _HERE / "own_recipe" / "net.yaml"
"""A recipe of two layers, which imports a module beside it."""
SLOW = _HERE / "slow_recipe" / "slow.yaml"
"""A recipe whose costs are sleeps: its loader, its step."""
TRAIN = _HERE / "own_script" / "train.py"
"""A Lightning script with options."""
