"""Seeded kills of the real parts under a hostile workload, judged by a twin that nobody killed (``make chaos``)."""
