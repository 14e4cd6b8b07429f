"""Imported by the server that forks the tests' ranks: the sums of content are compiled once, for 2 s, for all of them."""

from pdcluster_connector.worker.content_loop import compiled_loop

LOOP = compiled_loop()
