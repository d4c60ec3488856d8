"""The target's engine: one thread that owns the model and its sessions, and plans and runs passes."""
