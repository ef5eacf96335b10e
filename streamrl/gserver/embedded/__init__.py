"""The embedded engine: continuous batching in torch for Llama, Qwen2 and Qwen3 shaped models.

`architecture` reads the model's shape from config.json. `weights` holds the weights, `products` multiplies with packed
copies of them, `adapters` holds low-rank adapters. `model` has the forward pass and the cache of keys and values,
`prefix_cache` shares cached prefixes, `sampler` draws tokens, `request` holds the state of a request. `scheduler`
chooses the work of each step (its `DeterministicScheduler` computes each request separately, so that results can be
reproduced), and `engine` runs the steps in a separate thread.
"""
