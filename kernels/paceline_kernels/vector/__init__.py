"""What compiled loops are made of: vectors of floats and integers, elementary functions, random words."""
