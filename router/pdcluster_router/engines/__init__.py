"""The engines of a pool: how they are, and which of them may be asked."""
