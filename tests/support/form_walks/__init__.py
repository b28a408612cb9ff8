"""Forms put to the test: schemas of others, and outputs drawn at random from what a form allows."""
