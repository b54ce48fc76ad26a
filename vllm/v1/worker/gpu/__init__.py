"""Names of the worker that code from elsewhere imports."""
