"""The orchestrator's side of drafts and targets: links, rotation, circuit breakers, sessions on workers."""
