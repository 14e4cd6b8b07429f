"""The router's settings: the forms of their values, the parts, and all of them together."""
