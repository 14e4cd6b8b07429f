"""vLLM's entry point ``vllm.general_plugins``: makes ``PDClusterConnector`` known by name."""

from __future__ import annotations

from pdcluster_connector.vllm.facts import register_connector
from pdcluster_protocol.launch import CONNECTOR, CONNECTOR_MODULE


def register() -> None:
    """vLLM finds the connector by ``{"kv_connector": "PDClusterConnector"}``. May be called in every process."""
    register_connector(CONNECTOR, CONNECTOR_MODULE)
