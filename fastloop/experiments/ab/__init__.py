"""An A/B: arms that train in alternation, the parity gates, and the results."""
