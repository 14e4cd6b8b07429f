"""Commands that run within an engine's pod: whether it can serve, and whether it is idle."""
