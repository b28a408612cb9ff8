"""Who breaks the plan protocol: messages beyond their bounds, and an executor that sends them."""
