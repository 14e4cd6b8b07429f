"""The planner: the actions that one look at a PDCluster and its children asks for, in their order."""
