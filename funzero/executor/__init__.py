"""The only layer with side effects: it places leaves, gathers and reduces them, and runs the composed step."""
