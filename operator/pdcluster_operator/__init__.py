"""Keeps PDClusters on Kubernetes as their users want them: reads, plans, applies."""
