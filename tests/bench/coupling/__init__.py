"""How often drafts drawn with the target's noise are accepted, beside rejection sampling of the same drafts."""
