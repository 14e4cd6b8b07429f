"""vLLM's entry point ``vllm.general_plugins``: makes ``PDClusterConnector`` known by name."""

from __future__ import annotations

from pdcluster_connector.vllm.facts import register_connector


def register() -> None:
    """vLLM finds the connector by ``{"kv_connector": "PDClusterConnector"}``. May be called in every process."""
    register_connector("PDClusterConnector", "pdcluster_connector.vllm.connector")
