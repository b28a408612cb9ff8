"""What a scheduler was told and planned, in files: written by an observer, read to repeat, explain, try otherwise."""
