"""Engines and routers as processes of this machine: their command lines, how they are forked, how they start and end."""
