"""What the connector decides: pure, single-threaded, without clock, log or I/O."""
