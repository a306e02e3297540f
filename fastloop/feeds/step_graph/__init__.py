"""Records a training step's forward and backward once as CUDA graphs, and replays them."""
