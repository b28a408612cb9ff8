"""What the executor's fast numbers cost in quality, against float32 of the same model file: `make quality`."""
