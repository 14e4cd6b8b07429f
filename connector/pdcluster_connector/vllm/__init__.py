"""The only modules of the connector that import vLLM. The rest of the connector runs without vLLM."""
