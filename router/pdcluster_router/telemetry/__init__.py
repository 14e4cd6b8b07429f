"""What is told of requests: failures, metrics, trace."""
