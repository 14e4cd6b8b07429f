"""Access to Kubernetes for router, operator and command line: credentials, sessions, reads and watches, one back-off.

Each of the three decides itself what it asks and what an answer means. Imports nothing of ours but the protocol.
"""
