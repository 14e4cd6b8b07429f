"""The door to vLLM: only modules of this folder import it. The rest of the connector runs without it."""
