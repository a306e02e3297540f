"""``python -m fastloop``."""

from fastloop.cli import main

main()
