"""The plan protocol for both of its sides: its values, how they travel, and the hashes that both compute."""
