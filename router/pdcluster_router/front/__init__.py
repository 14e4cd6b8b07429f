"""What a client meets: sockets, HTTP, the two applications, keys, and the hot paths."""
