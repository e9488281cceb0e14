"""Loss hooks: trees, masks and losses on tensors. One file per method."""
