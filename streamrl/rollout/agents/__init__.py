"""Agents: programs that ask a language model, and are trained as they are (docs/agents.md)."""
