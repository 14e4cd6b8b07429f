"""What the router decides: no I/O, no clock, no logging."""
