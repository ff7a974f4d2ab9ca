"""The model: configuration and weights of a checkpoint, rotary tables, forward pass."""
