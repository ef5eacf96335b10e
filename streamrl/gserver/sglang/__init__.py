"""Real SGLang as the engine of a gserver: started, watched and ended; its own HTTP API is the gserver's."""
