"""The gateway's page in a real browser, before a real system without a model."""
