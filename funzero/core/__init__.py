"""Trees, meshes, specs, collectives and the state: everything that knows nothing of training."""
