"""The ``pdcluster`` command: starts the parts as processes and imports none of their insides."""
