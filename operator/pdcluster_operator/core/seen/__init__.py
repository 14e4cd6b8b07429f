"""The view of each object that the operator watches, and the picture of one PDCluster that is made of them."""
