"""What compiled loops are made of: vectors of floats and integers, elementary functions, random words."""

MAX_SLICES = 8  # that a dot product is summed in
