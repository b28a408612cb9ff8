"""Operations on tensors and integers: every operation a package with a reference and one file per device."""
