"""A training step's forward and backward as graphs that are recorded once and replayed."""
