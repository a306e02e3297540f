"""Properties of model and dataset: floating-point operations, captured graphs, hazards, distance of gradients."""
