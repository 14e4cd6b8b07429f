"""The router's decisions: no I/O, no clock, no logging."""
