"""One request from its admission to its end: both legs, the metaserver, the answer."""
