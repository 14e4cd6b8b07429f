"""One Kubernetes room for router, operator and command line: who we are, one session, lists and watches, one back-off.

Each of the three decides what it asks and what an answer means. Imports nothing of ours but the protocol.
"""
