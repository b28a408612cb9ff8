"""What tests of the scheduler are made of: requests, outputs, schedulers without an edge or with one."""
