"""Transports: how bytes get from one engine's memory into another's."""
