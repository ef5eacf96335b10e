"""What a model is for: policy, critic, reward model. Algorithms live here, parallelism in `backends/`."""
