"""The embedded engine: continuous batching in torch for Llama, Qwen2 and Qwen3 shaped models.

`architecture` reads the shape from config.json, `parameters` holds the weights, `cache` the keys
and values, `model` computes with them, `sampler` draws tokens, `scheduler` decides what is
computed in a step (`apart`: each request for itself, so that results can be repeated), and
`engine` runs the steps in a thread of its own.
"""
