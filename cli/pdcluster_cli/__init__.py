"""The ``pdcluster`` command. Starts the parts as processes.

Of their insides it imports pure modules of router and operator, the API's models, and the connector's self-test.
"""
