"""The product's own objects, taken through every order of events up to a bound."""
