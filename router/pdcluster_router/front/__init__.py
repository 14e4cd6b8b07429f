"""The side of the router that clients meet: sockets, HTTP, the two applications, keys, and the hot paths."""
