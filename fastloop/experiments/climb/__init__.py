"""The climb: choose the next rung, predict what it saves, and decide whether to keep it."""
