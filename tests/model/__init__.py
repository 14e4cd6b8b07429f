"""A program that walks every interleaving of a small system of the real cores: see ``__main__.py``."""
