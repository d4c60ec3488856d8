"""Draft heads: small networks that read what the target computed and guess what it says next."""
