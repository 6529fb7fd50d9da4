"""Draft heads: EAGLE and EAGLE-3."""
