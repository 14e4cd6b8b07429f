"""One router in several processes: the keeper that starts them, and what they share."""
