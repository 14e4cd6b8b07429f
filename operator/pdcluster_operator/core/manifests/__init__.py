"""The documents of each child of a PDCluster. Pure: from the spec to documents that the API server takes."""
