"""The target service: hosts the large model, verifies proposals, and drives every round."""
