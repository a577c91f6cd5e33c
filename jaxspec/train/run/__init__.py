"""How a training runs: the loop, its checkpoints, meshes and optimisers, and what is told of it."""
