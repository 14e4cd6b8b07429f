"""A rollout, step by step, from numbers alone: the fleet as it is, how many are wanted, what changes next."""
