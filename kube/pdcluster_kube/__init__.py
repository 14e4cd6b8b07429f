"""Access to Kubernetes for router, operator and command line: credentials, sessions, reads and watches, one back-off.

Router, operator and command line each decide what to ask and what an answer means. Of our packages this one imports
only the protocol.
"""
