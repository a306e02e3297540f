"""Properties of the model and the dataset: floating-point operations, captured graphs, hazards, distance of
gradients."""
