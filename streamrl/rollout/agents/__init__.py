"""Agents: programs that use a language model, and are trained unchanged (docs/agents.md)."""
