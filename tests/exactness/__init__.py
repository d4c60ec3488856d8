"""Proofs that the output follows the target's distribution: the rules are run on every outcome of every decision."""
