"""What a user writes and reads: data only, no I/O."""
