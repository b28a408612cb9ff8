"""What deciding, streaming and refusing cost a scheduler, and how much it gets done under open-loop load."""
