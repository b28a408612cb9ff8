"""The executor's link: who may drive it, the plan stream, and the thread that runs its steps."""
