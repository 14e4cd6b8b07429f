"""HTTP/1.1 as the hot paths speak it, with clients and with engines."""
