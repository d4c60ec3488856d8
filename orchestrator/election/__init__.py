"""Which of the orchestrators does what only one of them should."""
