"""The protocol, small enough to look at every state it can reach."""
