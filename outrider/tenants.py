"""Tenants, as workers know them: by a salt that tells them apart and tells nothing else."""

import hashlib
from typing import Final

DEFAULT_TENANT: Final = "default"
"""The tenant of all clients where no others are configured: they need not belong together."""


def cache_salt(tenant: str) -> bytes:
    """Return the salt that keeps tenants from sharing, and so from probing, each other's caches: 32 bytes."""
    return hashlib.sha256(f"salt\0{tenant}".encode()).digest()
