"""The engines of a pool: in which state they are, and which of them may be asked."""
