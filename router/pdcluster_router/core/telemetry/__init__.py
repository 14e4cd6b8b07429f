"""Facts of requests and answers, and the words in which they are told."""
