"""What the model and the dataset are: floating-point operations, captured graphs, hazards, distance of gradients."""
