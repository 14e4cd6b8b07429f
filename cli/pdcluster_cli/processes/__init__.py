"""Engines and routers as processes of this machine: their words, how they are forked, how they start and end."""
