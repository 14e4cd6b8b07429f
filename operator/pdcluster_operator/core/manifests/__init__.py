"""Makes the documents of each child of a PDCluster from its spec, as the API server takes them. Pure."""
