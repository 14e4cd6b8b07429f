"""The half of the connector that lives in vLLM's scheduler process."""
