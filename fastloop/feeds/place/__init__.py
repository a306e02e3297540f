"""A run's position in its data: redraws an epoch's order and continues in the middle of it."""
