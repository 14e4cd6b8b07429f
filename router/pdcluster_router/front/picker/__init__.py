"""The router as an endpoint picker: a gateway carries the bytes, the router decides which engines get the request."""
