"""The connector's decisions: pure, single-threaded, without clock, log or I/O."""
