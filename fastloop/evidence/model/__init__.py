"""Properties of the model: floating-point operations, captured graphs, memory that grows, distance of gradients."""
