"""Parts of decoder layers on the ops: linears, norms, attention, MLP and MoE."""
