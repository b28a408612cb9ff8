"""Whether a checkpoint predicts texts as well as another one: what `paceline validate` has an executor do."""
