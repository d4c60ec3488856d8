"""The target service: verifies proposals, keeps what the target would have said itself, and drives."""
