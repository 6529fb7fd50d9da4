"""Move requests with their KV rows between engines."""
