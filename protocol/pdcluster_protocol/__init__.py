"""What the parts of pdcluster say to each other, and how they are started: data, no I/O, no clock.

Two modules are for a process's start: ``flags.py`` makes its command line, ``logs.py`` sets up its log.
"""
