"""An A/B: arms trained in turns, parity gates, and what came of it."""
