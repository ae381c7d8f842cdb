"""gRPC between a client and a server: generated stubs (`v1`), the codec to our own nouns, statuses and errors, a client.

Knows messages and nouns; knows no engine. The servicers that answer these messages live in `serving.servicers`.
"""
