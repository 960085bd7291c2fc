"""Properties that hold for any tree, shape and spec."""
