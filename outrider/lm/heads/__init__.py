"""Draft heads: small networks that predict the target's next tokens from its features."""
