"""Files that the router reads again and again: how a change is seen, and what certificates in them must be."""
