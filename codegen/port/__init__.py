"""FlexAttention's mask and score functions, read and never run, as an entry of a spec."""
