"""The service that clients call: checks of requests, tenants and their quotas, admission, leases."""
