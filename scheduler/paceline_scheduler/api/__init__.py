"""The edge: text in, text out, for the clients of the scheduler.

`Edge` owns the open requests, `servicer_inference` and `servicer_admin` speak gRPC for it. Start reading at `edge.py`.
"""
