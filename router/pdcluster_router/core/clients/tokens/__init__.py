"""Tokens of an identity provider: the keys that sign them, what they say, and the client that each names."""
