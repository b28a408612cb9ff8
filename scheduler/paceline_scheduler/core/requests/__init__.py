"""Which requests there are, who listens to them, and how those come back that lost a listener or their scheduler."""
