"""The project beside its references, measured in one run on one machine.

``python -m benchmarks`` (``make bench``) runs all cases and writes ``benchmarks/out/results.json``; with the name of
a case it runs that one and replaces its part of the file; ``python -m benchmarks report`` makes the tables of
docs/performance.md and the plots from it, so that no figure is there that was not measured.

Rules. What is compared runs in turn, A B A B …, in the same run, on the same write-ahead log, each from a slot of
its own that was made before the data. Figures are medians; ratios are taken pair by pair. Servers, writers, Ray
and Spark share the machine, as on a laptop: the absolute figures are this machine's, the ratios are what travels.
Start-up is a case of its own and in no other figure: clocks start when reading does.
"""
