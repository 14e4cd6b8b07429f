"""Engines: which there are, how they are, and which of them gets a request."""
