"""Measures the project and its references in one run on one machine.

``python -m benchmarks`` (``make bench``) runs all cases and writes ``benchmarks/out/results.json``. With the name of a
case it runs that one and replaces its part of the file. ``python -m benchmarks report`` makes the tables of
docs/performance.md and the plots from the file, so that every figure there was measured.

Rules: things that are compared run in turn, A B A B …, in the same run, on the same write-ahead log, each from a slot
of its own that was made before the data. Figures are medians, and ratios are taken pair by pair. Servers, writers, Ray
and Spark share the machine, as on a laptop. So the absolute figures are this machine's, and the ratios hold elsewhere.
Start-up is a case of its own and is in no other figure: clocks start when reading starts.
"""
