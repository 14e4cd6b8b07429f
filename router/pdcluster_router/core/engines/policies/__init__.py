"""The policies: each a file, each chooses one engine of those that may get a request."""
