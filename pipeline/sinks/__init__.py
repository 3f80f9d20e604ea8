"""Sinks: the contract that each one keeps, and one module for each kind."""
