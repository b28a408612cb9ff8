"""What waits: its order, its bounds, its deadlines, and what is said of it to those who ask."""
