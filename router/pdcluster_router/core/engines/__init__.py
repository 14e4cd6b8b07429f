"""Engines: which ones exist, in which state they are, and which of them gets a request."""
