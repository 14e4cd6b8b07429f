"""The APIs of clients and engines over HTTP: bodies, heads, errors, streams."""
