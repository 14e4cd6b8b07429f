"""The objects that a user writes and reads: data only, no I/O."""
