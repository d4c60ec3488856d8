"""Connections to workers: one stream to each, circuit breakers, and the session of a request on a draft."""
