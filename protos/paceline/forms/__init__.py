"""The form of a structured output: checked, and as the text that both processes compile. Knows no tensors."""
