"""Drafts and targets as an orchestrator sees them: connections, rotation, circuit breakers, their sessions."""
