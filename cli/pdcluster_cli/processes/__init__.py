"""Engines and routers as processes of this machine: command lines, forks, starts and ends."""
