"""Wires between processes: message types and the clients that carry them. Knows no component."""
