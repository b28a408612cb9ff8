"""How much faster drafts make a real model, and whether the scheduler chooses as many as it should."""
