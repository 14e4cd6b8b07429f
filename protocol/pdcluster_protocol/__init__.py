"""The messages between the parts of pdcluster, and how the parts are started: data, no I/O, no clock.

Two modules are for a process's start: ``flags.py`` makes its command line, ``logs.py`` sets up its log.
"""
