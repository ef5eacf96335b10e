"""Real vLLM as the engine of a gserver: the gserver has the API and the stage, vLLM the model."""
