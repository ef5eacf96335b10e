"""Training backends: one interface, and one implementation for each library of parallel training."""
