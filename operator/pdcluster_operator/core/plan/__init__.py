"""The planner: from one look at a PDCluster and its children it makes the actions to take, in their order."""
