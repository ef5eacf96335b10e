"""Communication between processes: message types, and the clients that carry them. Depends on no component."""
