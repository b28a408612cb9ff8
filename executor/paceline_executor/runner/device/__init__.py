"""What the CUDA runner is made of; `runner.cuda` puts it together."""
