"""The package that recipes find themselves in: what they import relatively, and where pickle says their classes live.

It is a file, and not made at run time, because a loader's worker that starts by spawn has to import it by name.
"""

from __future__ import annotations

import os
import sys

from fastloop.config.shipped import shipped_root

FOLDER = "FASTLOOP_RECIPES"
"""Variable that tells such workers the folder of a recipe that is not shipped."""

__path__ = [os.environ.get(FOLDER) or str(shipped_root() / "recipes")]

# Checkpoints pickled by version 0.1 before this file moved name its classes by the old path.
sys.modules.setdefault("fastloop.bridge.recipe_modules", sys.modules[__name__])
