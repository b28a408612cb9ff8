"""What `paceline bench` does: plans requests, sends them as a load asks for, measures the answers, reports.

Knows this project's own client and OpenAI-compatible endpoints. Refuses to know how a server is started.
"""
