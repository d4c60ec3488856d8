"""KV blocks in Redis: their format, the store, what restoring them costs against computing them again."""
