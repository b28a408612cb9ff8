"""`make gpu`: everything that needs a CUDA GPU, stage by stage: kernels, runner, whole system, figures."""
