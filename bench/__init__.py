"""Measurements that anyone can run: `outrider bench`."""
