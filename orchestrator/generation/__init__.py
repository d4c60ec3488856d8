"""The generation of one request: proposals to the target, verdicts to Redis and the client, failover, replay."""
