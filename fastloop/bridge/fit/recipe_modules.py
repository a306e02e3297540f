"""The package into which recipes are imported: for their relative imports, and for the paths of their pickled classes.

It is a file and not made at run time, because a loader worker started by spawn must import it by name.
"""

from __future__ import annotations

import os

from fastloop.config.shipped import find_root

FOLDER = "FASTLOOP_RECIPES"
"""Environment variable that gives such workers the folder of a recipe that is not shipped."""

__path__ = [os.environ.get(FOLDER) or str(find_root() / "recipes")]
