"""What the scheduler shows of itself: metrics, traces, a line of the log now and then."""
