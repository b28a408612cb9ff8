"""The OpenAI HTTP API as a client of Paceline's: holds nothing that outlives a request."""
