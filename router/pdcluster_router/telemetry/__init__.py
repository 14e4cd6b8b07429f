"""Records of requests: failures, metrics, trace."""
