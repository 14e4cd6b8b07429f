"""Which engines there are, how they are, and who may be asked."""
