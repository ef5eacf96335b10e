"""streamrl: asynchronous reinforcement learning for language models.

Generation and training run in separate pools; `docs/architecture.md` traces one group of
responses through the system.
"""

__version__ = "0.1.0"
