"""Roles of models: policy, critic, reward model. Algorithms are here, parallelism is in `backends/`."""
