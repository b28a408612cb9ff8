"""An executor of several ranks: processes that share each layer of one model, and are one executor to the scheduler."""
