"""Pure functions of trees: gradients, accumulation, norms, optimizers, schedules, losses."""
