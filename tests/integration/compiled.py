"""The server that forks the tests' ranks imports this: the sums of content are compiled once, for 2 s, for all."""

from pdcluster_connector.worker.content_loop import compiled_loop

LOOP = compiled_loop()
