"""What computes: one interface, one implementation for each library of parallel training."""
