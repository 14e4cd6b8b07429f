"""A rank's checks of its machine before it serves."""
