"""Inputs that no peer of ours would send."""
