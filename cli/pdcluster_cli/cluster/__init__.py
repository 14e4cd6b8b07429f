"""Commands that ask a Kubernetes cluster, or read a file for one: what would be made, what is wrong, what happened.

``documents`` reads PDClusters, ``routers`` asks a pool's routers; both look with the user's own rights.
"""
