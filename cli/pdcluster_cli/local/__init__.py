"""``pdcluster local``: one command that starts a pool on this machine, asks it one question, and serves.

    options -> checks -> pool (start) -> chat (first question) -> report -> watch until Ctrl-C

``plan`` is pure, and so is ``options``, except ``main`` and argparse's error exit. Only ``command`` knows the order of
steps.
"""
