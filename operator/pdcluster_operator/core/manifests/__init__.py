"""What each child of a PDCluster looks like. Pure: from the spec to documents that the API server takes."""
