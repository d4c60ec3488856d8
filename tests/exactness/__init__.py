"""The proof that output follows the target's law: production rules, run on every outcome of every decision."""
