"""Clients of the `server` that a module makes, and its backend."""

import grpc
import pytest

from paceline.v1.inference_pb2_grpc import InferenceServiceStub


@pytest.fixture
def backend(server):
    """What the test runs requests with."""
    return server.backend


@pytest.fixture
async def channel(server):
    """A client's connection."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    """That client."""
    return InferenceServiceStub(channel)
