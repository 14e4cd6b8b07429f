"""The half of the connector that lives in each of vLLM's worker processes."""
