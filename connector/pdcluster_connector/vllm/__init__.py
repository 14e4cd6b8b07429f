"""The door to vLLM: all modules that import it, except at type checking. The rest of the connector runs without it."""
