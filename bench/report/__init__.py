"""Records of runs, their plots and the generated page."""
