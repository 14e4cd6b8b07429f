"""The status of a PDCluster: its conditions, how they follow from facts, and the words that users meet."""
