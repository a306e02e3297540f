"""Properties of the model: captured graphs, memory that grows, distance of gradients."""
