"""Decisions only: no I/O, no clock, no log. Times come in as ``now``, what to do goes out as values."""
