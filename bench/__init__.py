"""Benchmarks of `specdec bench`: every result is compared with a reference before its time is reported.

ops/      ops against their floor and baselines: `harness.py` defines and measures a case, `cases/` has a file per room
          of csrc/, `baselines/` calls other packages' kernels
engine/   rounds of the engine, forward passes, drafts of the n-gram index on a text
compare/  this engine, SGLang and vLLM on the same checkpoints
server/   a server and the engine that it serves
report/   records, tables, plots, and the page of benchmarks
sizes.py  chains and trees by name and number of tokens, for engine/ and compare/

The command line loads these modules lazily; none of them imports it.
"""
