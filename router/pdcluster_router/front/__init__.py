"""The ports of the router: sockets, HTTP, the two applications, keys, and the hot paths."""
