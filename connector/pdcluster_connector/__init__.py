"""The vLLM connector: pushes a prompt's KV layer by layer from prefill into blocks that decode reserved."""
