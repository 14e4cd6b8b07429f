"""``pdcluster local``: one command that starts a pool on this machine, asks it one question, and serves.

    options -> checks -> pool (start) -> chat (first question) -> report -> watch until Ctrl-C

``options`` and ``plan`` are pure; ``command`` is the only one that knows the order.
"""
