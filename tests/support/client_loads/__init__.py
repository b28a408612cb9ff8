"""What clients do to a scheduler that its own tests wait for: streams ended in every way, frames of HTTP/2."""
