"""Runners: what stands between the step loop's arrays and a device. `interface` is the seam, `cpu` the CPU's side."""
