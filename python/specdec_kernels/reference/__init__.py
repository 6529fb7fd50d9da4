"""The ops in plain torch, float64 where there are floats: written to be read, and what the tests compare with."""
