"""The ``pdcluster`` command: starts the parts as processes, and shares the pure cores of some."""
