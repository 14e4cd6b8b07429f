"""The messages between the parts of pdcluster, and how the parts are started: data, no I/O, no clock.

Four modules are more: ``flags.py`` makes a process's command line, ``logs.py`` sets up its log, ``open_files.py``
raises its limit of open files, and ``pem_files.py`` helps to read certificates.
"""
