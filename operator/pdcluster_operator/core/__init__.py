"""Decisions only: no I/O, no clock, no log. Times come in as ``now``, actions go out as values."""
