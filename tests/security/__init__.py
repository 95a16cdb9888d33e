"""What a tenant can do to kvplace and to other tenants, tried on a real API server."""
