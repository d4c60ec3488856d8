"""What to verify, how long to wait and what passes cost: decisions from measured times, without a model."""
