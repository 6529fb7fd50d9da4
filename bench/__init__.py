"""The benchmark harness behind `specdec bench`: every op's result is checked before its time is printed.

`harness.py` says what a case is and measures one, `timing.py` has the two clocks, `ceilings.py` measures what the
device could do at most, `cases/` has one file per room, `peers/` calls other packages' kernels, `plot.py` draws a run,
`report.py` writes docs/benchmarks.md from recorded runs. `ngram_replay.py` stands alone: what the n-gram index's drafts
are worth on a text; and so do those of whole engines, `shootout.py`, and of a server, `server.py` with its clients in
`server_client.py`.
"""
