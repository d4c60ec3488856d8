"""The draft's engine: one thread that owns the drafter and its sessions."""
