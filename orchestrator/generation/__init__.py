"""One request's life: proposals to the target, verdicts to Redis and the client, failover, replay."""
