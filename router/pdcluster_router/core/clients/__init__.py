"""Clients: who asks, from where, what each may ask for, and how much is let in."""
