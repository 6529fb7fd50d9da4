"""The parts that run a round on the device: slot state, rings, CUDA graphs, prefill, and the round itself."""
