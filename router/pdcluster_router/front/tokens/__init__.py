"""Tokens of an identity provider: where its keys come from, and the check of each token that clients show."""
