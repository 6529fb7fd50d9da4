"""What runs a round on the device: slot state, rings, CUDA graphs, prefill, and the round itself."""
