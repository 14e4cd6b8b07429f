"""A program that spoils KV on decode in many ways and looks whether the comparison finds it: see ``__main__.py``."""
