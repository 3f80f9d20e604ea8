"""``xidstream demo`` and the embedded PostgreSQL server that it, the tests and the benchmarks use."""
