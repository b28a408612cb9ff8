"""The side-by-side benchmark: this system and its peers on one machine, in one run, `make bench`."""
