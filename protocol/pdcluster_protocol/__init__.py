"""What the parts of pdcluster say to each other: data only, no I/O, no clock."""
