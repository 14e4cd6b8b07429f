"""The door to vLLM: all that imports it, and nothing else does. The rest of the connector runs without it."""
