"""Where the workers are: fixed addresses, names in DNS, or the endpoints of a Kubernetes service."""
