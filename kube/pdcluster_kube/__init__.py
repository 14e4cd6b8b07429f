"""One Kubernetes room for router, operator and command line: who we are, one session, lists and watches, one back-off.

What is asked and what an answer means stays with each of them. Imports nothing of ours but the protocol.
"""
